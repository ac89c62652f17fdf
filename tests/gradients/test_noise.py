"""Normal numbers of the cipher against the normal law."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from lightning_dp.gradients import FlatGradient, standard_normal
from lightning_dp.gradients.noise import BLOCK, normal_blocks
from lightning_dp.sampling import KeyStream, insecure_key

COUNT = 400_000


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def sample(request: pytest.FixtureRequest) -> torch.Tensor:
    blocks = normal_blocks(KeyStream(insecure_key(5), "noise"), 0, scale=1.0, dtype=request.param, count=COUNT)
    return torch.cat([next(blocks).to(torch.float64, copy=True) for _ in range(0, COUNT, BLOCK)])[:COUNT]


def test_the_law_is_normal(sample: torch.Tensor) -> None:
    """Kolmogorov-Smirnov and Anderson's tails: false alarm 1e-6 each."""
    assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-6
    for threshold in (2.0, 3.0, 4.0):
        beyond = int((sample.abs() > threshold).sum())
        assert stats.binomtest(beyond, COUNT, 2 * stats.norm.sf(threshold)).pvalue > 1e-6


def test_the_two_halves_of_a_pair_are_uncorrelated(sample: torch.Tensor) -> None:
    """Also their squares, which a wrong angle would tie together; 4.9 standard errors."""
    blocks = sample[: COUNT // BLOCK * BLOCK].view(-1, 2, BLOCK // 2)
    first, second = blocks[:, 0].flatten(), blocks[:, 1].flatten()
    assert abs(float((first * second).mean())) < 4.9 / math.sqrt(COUNT / 2)
    assert abs(float(((first**2 - 1) * (second**2 - 1)).mean())) < 4.9 * 2 / math.sqrt(COUNT / 2)


@pytest.mark.parametrize("count", [1, 2, 3, 1001])
def test_any_number_of_values_can_be_drawn(count: int) -> None:
    stream = KeyStream(insecure_key(5), "noise")
    values = standard_normal(stream, 3, count)
    assert values.shape == (count,)
    assert torch.isfinite(values).all()


def flat(values: torch.Tensor) -> FlatGradient:
    vector = FlatGradient({"weight": torch.nn.Parameter(torch.zeros_like(values))})
    vector.vector.copy_(values)
    return vector


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_a_release_is_the_sum_over_the_size_plus_noise_and_clears_the_sum(scale: float) -> None:
    values = torch.randn(140_001)
    raw, released = flat(values), flat(torch.ones(140_001))
    stream = KeyStream(insecure_key(1), "noise")
    released.take(raw, factor=0.25, scale=scale, stream=stream, index=4)
    expected = 0.25 * values.double() + scale * standard_normal(stream, 4, 140_001)
    assert torch.allclose(released.vector.double(), expected, atol=1e-6)
    assert not raw.vector.any()


def test_numbers_of_one_block_and_of_the_next_are_unrelated(sample: torch.Tensor) -> None:
    """Serial correlation across blocks, 4.9 standard errors; no number occurs twice."""
    block = BLOCK
    first, second = sample[:block], sample[block : 2 * block]
    assert abs(float((first * second).mean())) < 4.9 / math.sqrt(block)
    assert len(sample.unique()) > 0.98 * COUNT  # float32 has few numbers for so many draws
