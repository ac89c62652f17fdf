"""The least noise for a budget: where it lands, how fast, and what is said when nothing lands."""

from __future__ import annotations

import math
import statistics
import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp import errors
from lightning_dp.accounting.calibrate import calibrate_noise_multiplier
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Gaussian, PoissonSampled
from lightning_dp.errors import CalibrationError, InvalidValueError

RUN: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-5, "sampling_rate": 0.01, "num_updates": 1000}
RANDOM = Random(20240607)


def achieved(
    sigma: float, delta: float = 1e-5, sampling_rate: float = 0.01, num_updates: int = 1000, **_: Any
) -> float:
    return (num_updates * PoissonSampled(Gaussian(sigma), sampling_rate)).epsilon(delta)


def random_run(random: Random, *, least_hits: float) -> dict[str, Any]:
    """Targets from 0.01 to 100; records are hit ``least_hits`` times at least in expectation."""
    while True:
        run = {
            "epsilon": 10 ** random.uniform(-2, 2),
            "delta": 10 ** random.uniform(-12, -3),
            "sampling_rate": 10 ** random.uniform(-4, 0),
            "num_updates": round(10 ** random.uniform(0, 5)),
        }
        if run["sampling_rate"] * run["num_updates"] >= least_hits:
            return run


@pytest.mark.parametrize("target", [1e-4, 0.01, 0.1, 1, 3, 8, 50, 1000])
def test_lands_just_below_the_target(target: float) -> None:
    sigma = calibrate_noise_multiplier(**{**RUN, "epsilon": target})
    assert 0.9999 * target <= achieved(sigma) <= target


@pytest.mark.parametrize("run", [random_run(RANDOM, least_hits=3) for _ in range(60)])
def test_lands_just_below_random_targets(run: dict[str, Any]) -> None:
    sigma = calibrate_noise_multiplier(**run)
    assert 0.9999 * run["epsilon"] <= achieved(sigma, **run) <= run["epsilon"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lands_just_below_500_random_targets_or_says_what_is_reachable() -> None:
    random = Random(1)
    for run in (random_run(random, least_hits=1e-3) for _ in range(500)):
        hit = -math.expm1(run["num_updates"] * math.log1p(-run["sampling_rate"]))
        start = time.perf_counter()
        if hit < run["delta"]:  # delta allows for every loss
            with pytest.raises(CalibrationError, match="at most 0"):
                calibrate_noise_multiplier(**run)
        else:
            sigma = calibrate_noise_multiplier(**run)
            assert 0.9999 * run["epsilon"] <= achieved(sigma, **run) <= run["epsilon"], run
        assert time.perf_counter() - start < 60, run


@pytest.mark.parametrize(
    ("sampling_rate", "num_updates"),
    [(0.5, 1), (1e-4, 1), (1.0, 30), (0.5, 30), (1e-4, 100_000), (0.004, 100_000), (1.0, 100_000)],
)
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_lands_just_below_the_target_in_other_runs(sampling_rate: float, num_updates: int, adjacency: Any) -> None:
    run = {"delta": 1e-6, "sampling_rate": sampling_rate, "num_updates": num_updates}
    sigma = calibrate_noise_multiplier(epsilon=2.0, adjacency=adjacency, **run)
    cost = (num_updates * PoissonSampled(Gaussian(sigma), sampling_rate)).epsilon(1e-6, adjacency=adjacency)
    assert 0.9999 * 2 <= cost <= 2


@pytest.mark.parametrize("run", [random_run(RANDOM, least_hits=10) for _ in range(4)])
def test_agrees_with_bisection(run: dict[str, Any]) -> None:
    low, high = 0.05, 1e4
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if achieved(middle, **run) <= run["epsilon"] else (middle, high)
    assert calibrate_noise_multiplier(**run) == pytest.approx(high, rel=1e-4)


def test_slightly_less_noise_misses_the_target() -> None:
    sigma = calibrate_noise_multiplier(**RUN)
    assert achieved(sigma * (1 - 3e-5)) > 3


def test_recovers_the_noise_of_a_reference_run() -> None:
    assert calibrate_noise_multiplier(**{**RUN, "epsilon": 1.8282366667}) == pytest.approx(1.0, rel=2e-5)


@settings(max_examples=20, deadline=None)
@given(
    sigma=st.floats(0.6, 50),
    sampling_rate=st.floats(1e-3, 0.9),
    num_updates=st.integers(100, 100_000),
    delta=st.sampled_from([1e-10, 1e-6, 1e-3]),
)
def test_finds_the_noise_that_a_cost_was_computed_from(
    sigma: float, sampling_rate: float, num_updates: int, delta: float
) -> None:
    run = {"delta": delta, "sampling_rate": sampling_rate, "num_updates": num_updates}
    epsilon = achieved(sigma, **run)
    if not 1e-4 < epsilon < 1000:
        return
    found = calibrate_noise_multiplier(epsilon=epsilon, **run)
    assert sigma * (1 - 1e-6) <= found <= sigma * (1 + 1e-4)


def test_what_is_spent_is_part_of_the_target() -> None:
    spent = 500 * PoissonSampled(Gaussian(1.0), 0.01)
    sigma = calibrate_noise_multiplier(**RUN, spent=spent)
    total = spent + 1000 * PoissonSampled(Gaussian(sigma), 0.01)
    assert 0.9999 * 3 <= total.epsilon(1e-5) <= 3
    assert sigma > calibrate_noise_multiplier(**RUN)


@pytest.mark.parametrize("share", [0.5, 0.99, 0.9999])
def test_little_may_be_left_of_the_target(share: float) -> None:
    spent = 500 * PoissonSampled(Gaussian(1.0), 0.01)
    target = spent.epsilon(1e-5) / share
    sigma = calibrate_noise_multiplier(**{**RUN, "epsilon": target}, spent=spent)
    total = spent + 1000 * PoissonSampled(Gaussian(sigma), 0.01)
    assert 0.9999 * target <= total.epsilon(1e-5) <= target


def test_a_target_below_what_is_spent_names_the_reachable_range() -> None:
    spent = 1000 * PoissonSampled(Gaussian(1.0), 0.01)
    with pytest.raises(CalibrationError, match=r"above 1\.82824"):
        calibrate_noise_multiplier(**{**RUN, "epsilon": 1.5}, spent=spent)


def test_spending_without_noise_leaves_nothing_to_calibrate() -> None:
    with pytest.raises(CalibrationError, match="inf"):
        calibrate_noise_multiplier(**RUN, spent=Gaussian(0.0))


def test_a_target_that_the_least_noise_stays_below_names_the_reachable_range() -> None:
    with pytest.raises(CalibrationError, match="at most 0"):
        calibrate_noise_multiplier(epsilon=3.0, delta=0.01, sampling_rate=1e-5, num_updates=10)


def test_calibration_takes_few_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []
    read = PoissonSampled.__post_init__
    monkeypatch.setattr(PoissonSampled, "__post_init__", lambda self: (readings.append(1), read(self))[1])
    counts = []
    for target in (1e-3, 0.01, 0.1, 1, 3, 8, 30):
        readings.clear()
        calibrate_noise_multiplier(**{**RUN, "epsilon": target})
        counts.append(len(readings))
    assert statistics.median(counts) <= 4
    assert max(counts) <= 8


def test_calibration_takes_bounded_time() -> None:
    start = time.perf_counter()
    calibrate_noise_multiplier(**{**RUN, "epsilon": 0.1, "delta": 2e-6})
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in RUN for value in ("3", None, math.nan, math.inf, -1, 0)]
    + [("num_updates", 2.5), ("delta", 1.0), ("sampling_rate", 1.5), ("spent", 3.0), ("adjacency", "swap")],
)
def test_bad_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidValueError, match=name):
        calibrate_noise_multiplier(**{**RUN, name: value})


def test_a_ledger_is_spent_under_its_adjacency() -> None:
    ledger = Ledger(adjacency="replace_one")
    ledger.record(Gaussian(20.0), count=3)
    spent = 3 * Gaussian(20.0)
    expected = calibrate_noise_multiplier(**RUN, spent=spent, adjacency="replace_one")
    assert calibrate_noise_multiplier(**RUN, spent=ledger) == expected
    with pytest.raises(errors.IncomparableError, match="add_remove"):
        calibrate_noise_multiplier(**RUN, spent=ledger, adjacency="add_remove")
    ledger.record(Gaussian(20.0), chosen_from_outputs=True)
    with pytest.raises(errors.LedgerError, match="chosen from earlier outputs"):
        calibrate_noise_multiplier(**RUN, spent=ledger)
