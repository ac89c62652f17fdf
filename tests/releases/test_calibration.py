"""Gaussian noise for an epsilon and a delta, against the profile in high precision."""

from __future__ import annotations

import math

import mpmath
import pytest

from lightning_dp.errors import InvalidValueError
from lightning_dp.releases import gaussian_noise_multiplier


def exact_delta(noise_multiplier: float, epsilon: float) -> mpmath.mpf:
    """Balle and Wang (2018), Theorem 8, in 400 digits."""
    with mpmath.workdps(400):
        mu, eps = 1 / mpmath.mpf(noise_multiplier), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)


@pytest.mark.parametrize("epsilon", [1e-6, 0.01, 0.5, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("delta", [0.5, 1e-2, 1e-5, 1e-15, 1e-100])
def test_analytic_noise_is_the_smallest_that_suffices(epsilon: float, delta: float) -> None:
    """Within 1e-9, and within 1e-14 times the noise where that is more: the profile is rounded up by as much."""
    noise_multiplier = gaussian_noise_multiplier(epsilon, delta)
    assert exact_delta(noise_multiplier, epsilon) <= delta
    assert exact_delta(noise_multiplier * (1 - max(1e-9, 1e-14 * noise_multiplier)), epsilon) > delta


@pytest.mark.parametrize("epsilon", [1e-300, 1e300])
def test_extreme_epsilons_are_answered(epsilon: float) -> None:
    assert 0 < gaussian_noise_multiplier(epsilon, 1e-5) < math.inf


def test_classic_noise_is_the_published_formula() -> None:
    expected = math.sqrt(2 * math.log(1.25e5)) / 0.5
    assert gaussian_noise_multiplier(0.5, 1e-5, calibration="classic") == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("delta", [0.99, 0.5, 0.1, 1e-3, 1e-9, 1e-50])
def test_classic_noise_suffices_where_it_is_offered(epsilon: float, delta: float) -> None:
    """The theorem's proof takes a small delta for granted; the statement holds for every delta all the same."""
    classic = gaussian_noise_multiplier(epsilon, delta, calibration="classic")
    assert exact_delta(classic, epsilon) <= delta
    assert classic >= gaussian_noise_multiplier(epsilon, delta)


def test_the_classic_formula_is_wrong_for_large_epsilon() -> None:
    """Why it is refused: at epsilon 20 its noise gives a delta that is larger than the one asked for."""
    noise_multiplier = math.sqrt(2 * math.log(1.25e5)) / 20
    assert exact_delta(noise_multiplier, 20.0) > 1e-5


@pytest.mark.parametrize("epsilon", [1.0, 5.0])
def test_classic_noise_is_refused_from_epsilon_1_on(epsilon: float) -> None:
    with pytest.raises(InvalidValueError, match=r"`epsilon` must be below 1 for calibration='classic'.*analytic"):
        gaussian_noise_multiplier(epsilon, 1e-5, calibration="classic")


@pytest.mark.parametrize(
    ("epsilon", "delta", "calibration", "message"),
    [
        (0.0, 1e-5, "analytic", "`epsilon` must be finite and greater than 0"),
        (math.inf, 1e-5, "analytic", "`epsilon` must be finite and greater than 0"),
        (1.0, 0.0, "analytic", "`delta` must lie strictly between 0 and 1"),
        (1.0, 1.0, "analytic", "`delta` must lie strictly between 0 and 1"),
        (0.5, 1e-5, "exact", "`calibration` must be 'analytic' or 'classic', got 'exact'"),
        (1e-310, 1e-5, "classic", "no float can hold"),
    ],
)
def test_bad_input_is_refused(epsilon: float, delta: float, calibration: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        gaussian_noise_multiplier(epsilon, delta, calibration=calibration)  # type: ignore[arg-type]
