"""The grid: what rounding costs is paid for, and nothing but multiples of the step comes out."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from lightning_dp.errors import InvalidValueError
from lightning_dp.releases.grid import Grid

SCALES = st.floats(min_value=1e-12, max_value=1e12)


@given(sensitivity=SCALES, multiplier=st.floats(min_value=1e-6, max_value=1e3), rounding=st.integers(1, 1000))
def test_noise_is_at_least_the_multiplier_times_the_distance_on_the_grid(
    sensitivity: float, multiplier: float, rounding: int
) -> None:
    grid = Grid.of(sensitivity=sensitivity, noise_multiplier=Fraction(multiplier), rounding=rounding)
    assert grid.scale >= Fraction(multiplier) * grid.distance > grid.scale - 1
    assert grid.distance >= Fraction(sensitivity) / Fraction(2) ** grid.exponent + rounding
    assert grid.scale >= 2**40
    # What the grid costs: at most 1e-5 of the noise here.
    assert grid.scale * 2.0**grid.exponent <= multiplier * sensitivity * (1 + 1e-5) * (1 + 1e-5)


@given(
    value=st.lists(st.floats(min_value=-100, max_value=100), min_size=1, max_size=5),
    moves=st.lists(st.floats(min_value=-1, max_value=1), min_size=5, max_size=5),
)
@settings(max_examples=300)
def test_neighbours_are_no_further_apart_than_the_distance(value: list[float], moves: list[float]) -> None:
    """A coarse grid, on which rounding is most of the distance; L1 and L2, against exact fractions."""
    first, second = np.array(value), np.array(value) + np.array(moves[: len(value)])
    exact = [Fraction(a) - Fraction(b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    apart = Grid(exponent=-2, distance=1, scale=1)
    steps = (apart.steps(first) - apart.steps(second)).tolist()
    assert sum(map(abs, steps)) <= 4 * sum(map(abs, exact)) + len(value)
    within = 4 * math.sqrt(sum(move**2 for move in exact)) + math.isqrt(len(value) - 1) + 1
    assert math.sqrt(sum(step**2 for step in steps)) <= within * (1 + 1e-12)


def laplace_profile(mu: float, epsilon: float) -> float:
    return max(0.0, -math.expm1((epsilon - mu) / 2))


def gaussian_profile(mu: float, epsilon: float) -> float:
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("scale", [4, 16])
@pytest.mark.parametrize("shift", [(1,), (2,), (20,), (1, 1), (16, 1), (4, 4), (1, 1, 1), (3, 2, 1)])
@pytest.mark.parametrize("law", ["laplace", "gaussian"])
def test_one_more_step_pays_for_the_discrete_law(law: str, scale: int, shift: tuple[int, ...]) -> None:
    """Brute force over the losses of a coarse grid; without the step the discrete profile is above the continuous one.

    Several numbers that move together are covered as well: their distance is the L1 or L2 norm of the shift.
    """
    z = np.arange(-40 * scale, 40 * scale + 1)
    energy = {"laplace": lambda x: np.abs(x) / scale, "gaussian": lambda x: x**2 / (2 * scale**2)}[law]
    density = np.exp(-energy(z)) / np.exp(-energy(z)).sum()
    losses, weights = np.zeros(1), np.ones(1)
    for step in shift:
        sums = (losses[:, None] + energy(z - step) - energy(z)).round(12).ravel()
        losses, where = np.unique(sums, return_inverse=True)
        weights = np.bincount(where.ravel(), (weights[:, None] * density).ravel())
    norm = sum(shift) if law == "laplace" else math.hypot(*shift)
    profile = {"laplace": laplace_profile, "gaussian": gaussian_profile}[law]
    epsilons = np.linspace(0.0, 3 * (norm + 1) / scale, 200)
    discrete = np.array([(weights * np.maximum(0, -np.expm1(epsilon - losses))).sum() for epsilon in epsilons])
    with_step = np.array([profile((norm + 1) / scale, epsilon) for epsilon in epsilons])
    without = np.array([profile(norm / scale, epsilon) for epsilon in epsilons])
    assert (discrete <= with_step + 1e-12).all()
    if len(shift) == 1:
        assert (discrete > without + 1e-6).any()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=4), st.integers(-60, 60))
def test_fast_and_exact_rounding_agree(values: list[float], exponent: int) -> None:
    spacing = Fraction(2) ** exponent
    grid = Grid(exponent=exponent, distance=1, scale=1)
    steps = grid.steps(np.array(values))
    assert steps.tolist() == [round(Fraction(value) / spacing) for value in values]
    for back, step in zip(grid.floats(steps).tolist(), steps.tolist(), strict=True):
        assert back == float(step * spacing)


def test_large_integers_keep_all_their_digits() -> None:
    grid = Grid(exponent=-3, distance=1, scale=1)
    largest = np.array([2**63 - 1, 2**53 + 1])
    assert grid.steps(largest).tolist() == [8 * (2**63 - 1), 8 * (2**53 + 1)]


def test_what_no_float_can_hold_becomes_the_largest_float() -> None:
    grid = Grid(exponent=970, distance=1, scale=1)
    most = np.finfo(np.float64).max
    for dtype in (np.int64, object):
        steps = np.array([2**60, -(2**60), 1], dtype=dtype)
        assert grid.floats(steps).tolist() == [most, -most, 2.0**970]


@pytest.mark.parametrize(("multiplier", "rounding"), list(itertools.product([1e14, 1e300], [1, 1000])))
def test_noise_too_wide_for_the_grid_is_refused(multiplier: float, rounding: int) -> None:
    with pytest.raises(InvalidValueError, match="Raise `epsilon`"):
        Grid.of(sensitivity=1.0, noise_multiplier=Fraction(multiplier), rounding=rounding)
