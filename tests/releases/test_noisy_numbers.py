"""Laplace and Gaussian releases against the laws they promise. False alarms: 1e-6 for each test, with fixed seeds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_dp.accounting import Gaussian, Ledger
from lightning_dp.accounting.mechanisms import Laplace
from lightning_dp.releases import gaussian_mechanism, gaussian_noise_multiplier, laplace_mechanism
from lightning_dp.releases.grid import Grid

COUNT = 50_000


def spacing_of(values: np.ndarray) -> int:
    """Largest ``e`` such that all values are multiples of ``2**e``."""
    ratios = [Fraction(value) for value in values.tolist() if value]
    return min((ratio.numerator & -ratio.numerator).bit_length() - ratio.denominator.bit_length() for ratio in ratios)


@pytest.mark.parametrize(
    ("sensitivity", "epsilon"), [(1.0, 1.0), (3.0, 0.1), (1e-12, 2.0), (1e12, 20.0), (1e-300, 1.0), (1.0, 1e-5)]
)
def test_laplace_noise_has_scale_sensitivity_over_epsilon(sensitivity: float, epsilon: float) -> None:
    value = np.full(COUNT, 5.0 * sensitivity)
    released = laplace_mechanism(value, sensitivity=sensitivity, epsilon=epsilon, ledger=Ledger(), insecure_seed=1)
    noise = released / sensitivity - 5.0
    # Rounding of 50,000 numbers costs 5e-8 / epsilon of the noise, 0.5 % in the last case.
    assert stats.kstest(noise * epsilon, stats.laplace.cdf).pvalue > 1e-6


@pytest.mark.parametrize(("sensitivity", "noise_multiplier"), [(1.0, 1.0), (1e-9, 0.3), (7.0, 1e4), (1e300, 2.0)])
def test_gaussian_noise_has_the_standard_deviation_asked_for(sensitivity: float, noise_multiplier: float) -> None:
    released = gaussian_mechanism(
        np.zeros(COUNT), sensitivity=sensitivity, noise_multiplier=noise_multiplier, ledger=Ledger(), insecure_seed=2
    )
    assert stats.kstest(released / sensitivity / noise_multiplier, stats.norm.cdf).pvalue > 1e-6


def test_gaussian_noise_follows_from_epsilon_and_delta() -> None:
    released = gaussian_mechanism(
        np.zeros(COUNT), sensitivity=2.0, epsilon=0.5, delta=1e-6, ledger=Ledger(), insecure_seed=3
    )
    scale = 2.0 * gaussian_noise_multiplier(0.5, 1e-6)
    assert stats.kstest(released / scale, stats.norm.cdf).pvalue > 1e-6


def test_noise_is_larger_by_what_rounding_adds_to_the_distance() -> None:
    """Where it can be seen: many numbers at an absurdly small epsilon. Each can move a step; in L2 it is a root."""
    sizes = {"rounding": COUNT}, {"rounding": math.isqrt(COUNT - 1) + 1}
    options: dict[str, Any] = {"sensitivity": 1.0, "ledger": Ledger(), "insecure_seed": 6}
    for released, wanted, size, law in (
        (laplace_mechanism(np.zeros(COUNT), epsilon=1e-7, **options), 1e7, sizes[0], stats.laplace),
        (gaussian_mechanism(np.zeros(COUNT), noise_multiplier=2e9, **options), 2e9, sizes[1], stats.norm),
    ):
        grid = Grid.of(sensitivity=1.0, noise_multiplier=Fraction(wanted), **size)
        scale = grid.scale * 2.0**grid.exponent
        assert scale > 1.05 * wanted
        assert stats.kstest(released / scale, law.cdf).pvalue > 1e-6
        assert stats.kstest(released / wanted, law.cdf).pvalue < 1e-6


def test_laplace_is_recorded_as_what_it_was() -> None:
    ledger = Ledger()
    laplace_mechanism(3, sensitivity=4.0, epsilon=0.5, ledger=ledger)
    laplace_mechanism([1.0, 2.0], sensitivity=9.0, epsilon=0.5, ledger=ledger, purpose="counts")
    assert [(entry.mechanism, entry.count, entry.purpose) for entry in ledger.entries] == [
        (Laplace(2.0), 1, "release"),
        (Laplace(2.0), 1, "counts"),
    ]
    assert ledger.num_updates == 0
    assert ledger.stamps == ()


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1 / 3, 1.0, 7.7, 1e-3])
def test_the_recorded_laplace_noise_is_not_more_than_epsilon_asks_for(epsilon: float) -> None:
    ledger = Ledger()
    laplace_mechanism(0, sensitivity=1, epsilon=epsilon, ledger=ledger)
    noise_multiplier = ledger.entries[0].mechanism.noise_multiplier  # type: ignore[attr-defined]
    assert Fraction(noise_multiplier) * Fraction(epsilon) >= 1
    assert 1 / noise_multiplier == pytest.approx(epsilon, rel=1e-15)


@pytest.mark.parametrize("calibration", ["analytic", "classic"])
def test_gaussian_is_recorded_as_what_it_was(calibration: Any) -> None:
    ledger = Ledger()
    gaussian_mechanism(3, sensitivity=4.0, epsilon=0.5, delta=1e-6, calibration=calibration, ledger=ledger)
    gaussian_mechanism(3, sensitivity=4.0, noise_multiplier=1.5, ledger=ledger)
    expected = Gaussian(gaussian_noise_multiplier(0.5, 1e-6, calibration=calibration))
    assert [entry.mechanism for entry in ledger.entries] == [expected, Gaussian(1.5)]


def test_a_ledger_holds_the_guarantee_that_was_asked_for() -> None:
    laplace, gaussian = Ledger(), Ledger()
    laplace_mechanism(3, sensitivity=4.0, epsilon=0.3, ledger=laplace)
    gaussian_mechanism(3, sensitivity=4.0, epsilon=0.7, delta=1e-6, ledger=gaussian)
    assert laplace.epsilon(1e-12) == pytest.approx(0.3, rel=1e-9)
    assert gaussian.epsilon(1e-6) == pytest.approx(0.7, rel=1e-9)
    assert gaussian.epsilon(1e-6) <= 0.7


def test_replacing_a_record_costs_as_much_as_removing_and_adding() -> None:
    ledger = Ledger(adjacency="replace_one")
    laplace_mechanism(3, sensitivity=4.0, epsilon=0.3, ledger=ledger)
    assert ledger.epsilon(1e-12) == pytest.approx(0.6, rel=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -2.7e-9, 123456.789, 1e9 + 0.1])
def test_results_are_multiples_of_a_step_that_does_not_depend_on_the_value(value: float) -> None:
    """The step is a power of two, at least 2**40 of them to the scale, whatever the value."""
    for scale, released in (
        (0.5, laplace_mechanism(np.full(2000, value), sensitivity=1.0, epsilon=2.0, ledger=Ledger())),
        (3.0, gaussian_mechanism(np.full(2000, value), sensitivity=1.0, noise_multiplier=3.0, ledger=Ledger())),
    ):
        step = spacing_of(released)
        wanted = math.floor(math.log2(scale)) - 40
        assert wanted - 2 <= step <= wanted if abs(value) < 1 else step >= wanted - 2


def test_values_far_beyond_64_bits_of_steps_keep_their_noise() -> None:
    released = laplace_mechanism(np.full(500, 2.0**40), sensitivity=1.0, epsilon=1.0, ledger=Ledger(), insecure_seed=4)
    assert stats.kstest(released - 2.0**40, stats.laplace.cdf).pvalue > 1e-6


def test_shapes_and_types_are_plain() -> None:
    ledger = Ledger()
    number = laplace_mechanism(np.float32(3), sensitivity=1, epsilon=1, ledger=ledger)
    table = gaussian_mechanism([[1, 2, 3], [4, 5, 6]], sensitivity=1, noise_multiplier=1, ledger=ledger)
    large = laplace_mechanism(2**62 + 1, sensitivity=1e-3, epsilon=1, ledger=ledger)
    assert type(number) is float
    assert type(large) is float
    assert isinstance(table, np.ndarray)
    assert (table.shape, table.dtype) == ((2, 3), np.float64)


def test_small_noise_leaves_the_value_recognisable() -> None:
    value = np.array([1.5, -2.25, 1e6])
    released = laplace_mechanism(value, sensitivity=1e-9, epsilon=1.0, ledger=Ledger())
    assert released == pytest.approx(value, abs=1e-7)
