"""Discrete noise against its exact law, at scales where the grid shows and where it does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from lightning_dp.releases.discrete_noise import MAX_SCALE, Integers, discrete_gaussian, discrete_laplace
from lightning_dp.releases.secret_integers import SecretIntegers
from lightning_dp.sampling import insecure_key

COUNT = 200_000
Draw = Callable[[SecretIntegers, int, int], Integers]


def laplace_weights(z: np.ndarray, scale: int) -> np.ndarray:
    return np.exp(-np.abs(z) / scale)


def gaussian_weights(z: np.ndarray, scale: int) -> np.ndarray:
    return np.exp(-(z**2) / (2 * scale**2))


LAWS = pytest.mark.parametrize(
    ("draw", "weights"), [(discrete_laplace, laplace_weights), (discrete_gaussian, gaussian_weights)]
)


@LAWS
@pytest.mark.parametrize("scale", [1, 2, 7])
def test_small_scales_have_the_exact_law(draw: Draw, weights: Callable[..., np.ndarray], scale: int) -> None:
    """Chi-square over all integers that are expected ten times, the rest together; false alarm 1e-6."""
    z = np.arange(-60 * scale, 60 * scale + 1)
    expected = COUNT * weights(z, scale) / weights(z, scale).sum()
    drawn = draw(SecretIntegers(insecure_key(11)), scale, COUNT)
    observed = np.bincount(drawn + 60 * scale, minlength=len(z))
    often = expected >= 10
    rest = [max(expected[~often].sum(), 1e-9)], [observed[~often].sum()]
    statistic = stats.chisquare(np.append(observed[often], rest[1]), np.append(expected[often], rest[0]))
    assert statistic.pvalue > 1e-6


@LAWS
@pytest.mark.parametrize("scale", [2**40 + 12345, MAX_SCALE])
def test_large_scales_have_the_continuous_law(draw: Draw, weights: Callable[..., np.ndarray], scale: int) -> None:
    """Kolmogorov-Smirnov, and both tails; false alarm 1e-6 each."""
    drawn = draw(SecretIntegers(insecure_key(12)), scale, COUNT) / scale
    law = stats.laplace if draw is discrete_laplace else stats.norm
    assert stats.kstest(drawn, law.cdf).pvalue > 1e-6
    for threshold in (2.0, 4.0):
        for tail in (drawn, -drawn):
            assert stats.binomtest(int((tail > threshold).sum()), COUNT, law.sf(threshold)).pvalue > 1e-6


@LAWS
def test_low_bits_are_uniform(draw: Draw, weights: Callable[..., np.ndarray]) -> None:
    """The lowest byte of the integer; false alarm 1e-6."""
    drawn = draw(SecretIntegers(insecure_key(13)), 2**41 + 1, COUNT)
    assert stats.chisquare(np.bincount(drawn & 255, minlength=256)).pvalue > 1e-6


@LAWS
def test_neighbours_in_an_array_are_uncorrelated(draw: Draw, weights: Callable[..., np.ndarray]) -> None:
    """Also in size; 4.9 standard errors, false alarm 1e-6 each."""
    drawn = draw(SecretIntegers(insecure_key(14)), 2**40, COUNT) / 2**40
    for values in (drawn, np.abs(drawn)):
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4.9 / np.sqrt(COUNT)
