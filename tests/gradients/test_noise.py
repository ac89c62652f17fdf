"""Normal numbers of the cipher against the normal law."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from lightning_dp.gradients import add_noise, standard_normal
from lightning_dp.sampling import KeyStream, insecure_key

COUNT = 400_000


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    return standard_normal(KeyStream(insecure_key(5), "noise"), 0, COUNT)


def test_the_law_is_normal(sample: torch.Tensor) -> None:
    """Kolmogorov-Smirnov and Anderson's tails: false alarm 1e-6 each."""
    assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-6
    for threshold in (2.0, 3.0, 4.0):
        beyond = int((sample.abs() > threshold).sum())
        assert stats.binomtest(beyond, COUNT, 2 * stats.norm.sf(threshold)).pvalue > 1e-6


def test_the_two_halves_of_a_pair_are_uncorrelated(sample: torch.Tensor) -> None:
    """Also their squares, which a wrong angle would tie together; 4.9 standard errors."""
    first, second = sample[: COUNT // 2], sample[COUNT // 2 :]
    assert abs(float((first * second).mean())) < 4.9 / math.sqrt(COUNT / 2)
    assert abs(float(((first**2 - 1) * (second**2 - 1)).mean())) < 4.9 * 2 / math.sqrt(COUNT / 2)


@pytest.mark.parametrize("count", [1, 2, 3, 1001])
def test_any_number_of_values_can_be_drawn(count: int) -> None:
    stream = KeyStream(insecure_key(5), "noise")
    values = standard_normal(stream, 3, count)
    assert values.shape == (count,)
    assert torch.isfinite(values).all()


def test_no_noise_leaves_the_sum_as_it_is() -> None:
    total = torch.randn(5)
    assert add_noise(total, scale=0.0, stream=KeyStream(insecure_key(1), "noise"), index=0) is total
