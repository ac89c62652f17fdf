import math
import time

import pytest

from lightning_dp.accounting.calibrate import calibrate_noise_multiplier
from lightning_dp.accounting.mechanisms import Gaussian, PoissonSampled
from lightning_dp.errors import CalibrationError, InvalidValueError

RUN = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.01, "num_updates": 1000}


def achieved(sigma, delta=1e-5, sampling_rate=0.01, num_updates=1000, **_):
    return (num_updates * PoissonSampled(Gaussian(sigma), sampling_rate)).epsilon(delta)


@pytest.mark.parametrize("target", [0.01, 0.1, 1, 3, 8, 50, 10000])
def test_lands_just_below_the_target(target):
    sigma = calibrate_noise_multiplier(**{**RUN, "epsilon": target})
    assert 0.9999 * target <= achieved(sigma) <= target


RUNS = [(0.5, 1), (1e-4, 1), (1.0, 30), (0.5, 30), (1e-4, 100_000), (0.004, 100_000), (1.0, 100_000)]
RARE = [pytest.param(1e-4, 30, marks=pytest.mark.slow), pytest.param(0.004, 30, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("sampling_rate", "num_updates"), RUNS + RARE)
def test_lands_just_below_the_target_in_other_runs(sampling_rate, num_updates):
    run = {"delta": 1e-6, "sampling_rate": sampling_rate, "num_updates": num_updates}
    sigma = calibrate_noise_multiplier(epsilon=2.0, **run)
    assert 0.9999 * 2 <= achieved(sigma, **run) <= 2


def test_slightly_less_noise_misses_the_target():
    sigma = calibrate_noise_multiplier(**RUN)
    assert achieved(sigma * (1 - 3e-6)) > 3


def test_recovers_the_noise_of_a_reference_run():
    assert calibrate_noise_multiplier(**{**RUN, "epsilon": 1.8282366667}) == pytest.approx(1.0, rel=2e-6)


def test_what_is_spent_is_part_of_the_target():
    spent = 500 * PoissonSampled(Gaussian(1.0), 0.01)
    sigma = calibrate_noise_multiplier(**RUN, spent=spent)
    total = spent + 1000 * PoissonSampled(Gaussian(sigma), 0.01)
    assert 0.9999 * 3 <= total.epsilon(1e-5) <= 3
    assert sigma > calibrate_noise_multiplier(**RUN)


def test_a_target_below_what_is_spent_names_the_reachable_range():
    spent = 1000 * PoissonSampled(Gaussian(1.0), 0.01)
    with pytest.raises(CalibrationError, match=r"above 1\.82824"):
        calibrate_noise_multiplier(**{**RUN, "epsilon": 1.5}, spent=spent)


def test_spending_without_noise_leaves_nothing_to_calibrate():
    with pytest.raises(CalibrationError, match="inf"):
        calibrate_noise_multiplier(**RUN, spent=Gaussian(0.0))


def test_a_target_that_the_least_noise_stays_below_names_the_reachable_range():
    with pytest.raises(CalibrationError, match="at most"):
        calibrate_noise_multiplier(epsilon=3.0, delta=0.01, sampling_rate=1e-5, num_updates=10)


def test_calibration_takes_bounded_time():
    start = time.perf_counter()
    calibrate_noise_multiplier(**{**RUN, "epsilon": 0.1})
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in RUN for value in ("3", None, math.nan, math.inf, -1, 0)]
    + [("num_updates", 2.5), ("delta", 1.0), ("sampling_rate", 1.5), ("spent", 3.0)],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(InvalidValueError, match=name):
        calibrate_noise_multiplier(**{**RUN, name: value})
