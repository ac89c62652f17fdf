"""The calculator against plain bisections, and what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dp import Gaussian, Ledger, PoissonSampled, errors
from lightning_dp.accounting.calculator import PrivacySettings, calculate_privacy, updates_per_epoch

ALL: dict[str, Any] = {
    "epsilon": 3.0,
    "delta": 1e-5,
    "noise_multiplier": 1.0,
    "sampling_rate": 0.01,
    "num_updates": 1000,
}
RANDOM = Random(11)


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (ALL | changes).items() if name not in names}


def cost(sigma: float, rate: float, updates: int, delta: float = 1e-5, adjacency: Any = "add_remove") -> float:
    return (updates * PoissonSampled(Gaussian(sigma), rate)).epsilon(delta, adjacency=adjacency)


def largest(fits: Callable[[int], bool], high: int) -> int:
    """Plain bisection for the largest whole number that fits, of a property that small numbers have."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def holds(found: PrivacySettings, adjacency: str = "add_remove") -> bool:
    """Whether the settings cost what they say."""
    run = found.num_updates * PoissonSampled(Gaussian(found.noise_multiplier), found.sampling_rate)
    return found.epsilon == run.epsilon(found.delta, adjacency=adjacency) and run == found.mechanism  # type: ignore[call-overload]


def test_epsilon_is_the_accountants() -> None:
    assert calculate_privacy(**without("epsilon")).epsilon == cost(1.0, 0.01, 1000)


def test_delta_is_the_accountants() -> None:
    found = calculate_privacy(**without("delta"))
    assert found.delta == (1000 * PoissonSampled(Gaussian(1.0), 0.01)).delta(3.0)
    assert found.epsilon == 3.0
    assert cost(1.0, 0.01, 1000, found.delta) == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one", "zero_out"])
@pytest.mark.parametrize("name", ["noise_multiplier", "sampling_rate"])
@pytest.mark.parametrize("epsilon", [0.01, 0.5, 3.0, 20.0])
def test_numbers_land_within_a_ten_thousandth_below_the_target(name: str, epsilon: float, adjacency: Any) -> None:
    found = calculate_privacy(**without(name, epsilon=epsilon), adjacency=adjacency)
    assert holds(found, adjacency)
    assert 0.9999 * epsilon <= found.epsilon <= epsilon


@pytest.mark.parametrize(
    ("sigma", "updates", "epsilon"),
    [(RANDOM.uniform(0.7, 5), round(10 ** RANDOM.uniform(1.5, 4)), 10 ** RANDOM.uniform(-1, 1)) for _ in range(6)],
)
def test_the_rate_is_that_of_a_bisection(sigma: float, updates: int, epsilon: float) -> None:
    low, high = 1e-9, 1.0
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(sigma, middle, updates) <= epsilon else (low, middle)
    given = without("sampling_rate", noise_multiplier=sigma, num_updates=updates, epsilon=epsilon)
    if high == 1:
        with pytest.raises(errors.CalibrationError, match="at most"):
            calculate_privacy(**given)
    else:
        assert calculate_privacy(**given).sampling_rate == pytest.approx(low, rel=1e-4)


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0])
def test_updates_are_the_most_that_fit(sigma: float) -> None:
    found = calculate_privacy(**without("num_updates", noise_multiplier=sigma))
    assert found.num_updates == largest(lambda n: n == 0 or cost(sigma, 0.01, n) <= 3, 10**6)


@pytest.mark.parametrize(("records", "updates"), [(60_000, 1000), (500, 50), (500, 20), (97, 300)])
def test_a_batch_is_the_largest_that_fits(records: int, updates: int) -> None:
    given = without("sampling_rate", num_updates=updates, noise_multiplier=1.5)
    found = calculate_privacy(**given, num_records=records)
    assert found.batch_size == largest(lambda b: b == 0 or cost(1.5, b / records, updates) <= 3, records)
    assert found.sampling_rate == found.batch_size / records


@pytest.mark.parametrize(("records", "epochs"), [(100, 2), (100, 0.7), (97, 10), (60, 1)])
@pytest.mark.parametrize("sigma", [0.8, 1.5, 4.0])
def test_at_fixed_epochs_no_larger_batch_fits(records: int, epochs: float, sigma: float) -> None:
    def fits(batch: int) -> bool:
        updates = math.ceil(epochs * math.ceil(records / batch) - 1e-9)
        return cost(sigma, batch / records, updates) <= 3

    best = max((batch for batch in range(1, records + 1) if fits(batch)), default=0)
    given = {"epsilon": 3, "delta": 1e-5, "noise_multiplier": sigma, "num_records": records, "epochs": epochs}
    if best in (0, records):
        with pytest.raises(errors.CalibrationError, match=r"every record in every update|batches of 1 to"):
            calculate_privacy(**given)
    else:
        found = calculate_privacy(**given)
        assert holds(found)
        assert found.batch_size == best


@pytest.mark.parametrize("epochs", [1, 2.5, 10, 200])
@pytest.mark.parametrize("epsilon", [0.3, 2.0, 4.0])
def test_at_fixed_epochs_the_rate_lands_below_the_target(epochs: float, epsilon: float) -> None:
    found = calculate_privacy(epsilon=epsilon, delta=1e-6, noise_multiplier=1.0, epochs=epochs)
    assert holds(found)
    assert 0.999 * epsilon <= found.epsilon <= epsilon
    assert found.num_updates == math.ceil(epochs * updates_per_epoch(found.sampling_rate) - 1e-9)
    for larger in (found.sampling_rate * 1.001, found.sampling_rate * 1.1, min(1.0, found.sampling_rate * 2)):
        updates = math.ceil(epochs * updates_per_epoch(larger) - 1e-9)
        assert cost(1.0, larger, updates, 1e-6) > epsilon


@pytest.mark.parametrize("records", [None, 1000])
def test_at_fixed_epochs_the_target_is_used_up_where_all_records_at_once_would_fit_too(records: int | None) -> None:
    at_once, in_two = cost(1.0, 1.0, 1, 1e-6), cost(1.0, 0.5, 2, 1e-6)
    target = (at_once + in_two) / 2  # batches of half the records cost more than one of all
    assert at_once < target < in_two
    given = {"delta": 1e-6, "noise_multiplier": 1.0, "epochs": 1, "num_records": records}
    found = calculate_privacy(epsilon=target, **given)
    assert 0.99 * target <= found.epsilon <= target
    with pytest.raises(errors.CalibrationError, match=f"Choose a target below {at_once:.6g}"):
        calculate_privacy(epsilon=8, **given)


def test_epochs_count_updates_as_the_training_loop_does() -> None:
    found = calculate_privacy(delta=1e-5, noise_multiplier=1.0, batch_size=30, num_records=100, epochs=3)
    assert (found.updates_per_epoch, found.num_updates, found.epochs) == (4, 12, 3.0)
    assert updates_per_epoch(1 / 49) == 49  # although 1 / (1 / 49) is not
    assert updates_per_epoch(1.0) == 1


@settings(max_examples=25, deadline=None)
@given(
    sigma=st.floats(0.6, 20),
    rate=st.floats(1e-3, 0.5),
    updates=st.integers(50, 20_000),
    delta=st.sampled_from([1e-9, 1e-6, 1e-4]),
    adjacency=st.sampled_from(["add_remove", "replace_one"]),
)
def test_each_solution_goes_back_to_the_others(
    sigma: float, rate: float, updates: int, delta: float, adjacency: Any
) -> None:
    run = {"delta": delta, "noise_multiplier": sigma, "sampling_rate": rate, "num_updates": updates}
    epsilon = calculate_privacy(**run, adjacency=adjacency).epsilon
    assume(1e-3 < epsilon < 200)
    run["epsilon"] = epsilon * (1 + 1e-9)

    def solved(name: str) -> PrivacySettings:
        return calculate_privacy(**{key: value for key, value in run.items() if key != name}, adjacency=adjacency)

    assert solved("num_updates").num_updates == updates
    assert solved("noise_multiplier").noise_multiplier == pytest.approx(sigma, rel=1e-4)
    assert solved("sampling_rate").sampling_rate == pytest.approx(rate, rel=1e-4)
    assert solved("delta").delta == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize("name", ["noise_multiplier", "sampling_rate", "num_updates"])
def test_what_a_ledger_has_spent_is_part_of_the_target(name: str) -> None:
    ledger = Ledger(adjacency="replace_one", unit="user", rows_per_unit=2)
    ledger.record(PoissonSampled(Gaussian(3.0), 0.02), count=100)
    found = calculate_privacy(
        **without(name, **({} if name == "noise_multiplier" else {"noise_multiplier": 2.0})), spent=ledger
    )
    before = ledger.epsilon(1e-5)
    ledger.record(found.mechanism)
    assert 0.97 * 3 <= found.epsilon == ledger.epsilon(1e-5) <= 3
    assert (found.adjacency, found.spent_epsilon) == ("replace_one", before)
    assert "spent before" in str(found)


def test_a_ledger_keeps_its_adjacency() -> None:
    with pytest.raises(errors.IncomparableError, match="replace_one"):
        calculate_privacy(**without("epsilon"), spent=Ledger(), adjacency="replace_one")


def test_a_plan_cannot_continue_mechanisms_that_were_chosen_from_outputs() -> None:
    ledger = Ledger()
    ledger.record(Gaussian(5.0), chosen_from_outputs=True)
    with pytest.raises(errors.LedgerError, match="chosen from earlier outputs"):
        calculate_privacy(**without("epsilon"), spent=ledger)


@pytest.mark.parametrize(
    ("given", "side", "end"),
    [
        (without("sampling_rate", noise_multiplier=100.0, num_updates=10), "below", cost(100.0, 1.0, 10)),
        (
            without("sampling_rate", noise_multiplier=100.0, num_updates=10, num_records=9),
            "below",
            cost(100.0, 1.0, 10),
        ),
        (without("sampling_rate", noise_multiplier=0.1, epsilon=0.3, num_records=99), "above", cost(0.1, 1 / 99, 1000)),
        (without("num_updates", sampling_rate=1.0), "above", cost(1.0, 1.0, 1)),
        (
            without("num_updates", noise_multiplier=1e8, sampling_rate=1.0),
            "below",
            cost(1e8, 1.0, 10_000_000_000),
        ),
    ],
)
def test_a_target_out_of_reach_is_refused_with_the_end_of_the_range(
    given: dict[str, Any], side: str, end: float
) -> None:
    with pytest.raises(errors.CalibrationError) as raised:
        calculate_privacy(**given)
    assert f"Choose a target {side} {end:.6g}," in str(raised.value)


@pytest.mark.parametrize("name", ["sampling_rate", "num_updates"])
def test_without_noise_no_target_is_in_reach(name: str) -> None:
    with pytest.raises(errors.CalibrationError, match="epsilon is infinite"):
        calculate_privacy(**without(name, noise_multiplier=0.0))


def test_a_delta_that_is_none_is_refused() -> None:
    with pytest.raises(errors.CalibrationError, match="not below 1 "):
        calculate_privacy(**without("delta", noise_multiplier=0.0))
    with pytest.raises(errors.CalibrationError, match="not below 1/N = 1/1000 "):
        calculate_privacy(**without("delta", epsilon=0.5), num_records=1000)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ALL, "all of them are given"),
        (without("epsilon", "delta"), "missing are `epsilon`, `delta`"),
        ({}, "`num_updates`"),
        (without("epsilon", batch_size=10, num_records=100), "`sampling_rate` and `batch_size`"),
        (without("epsilon", epochs=1), "`num_updates` and `epochs`"),
        (without("epsilon", "sampling_rate", batch_size=10), "`num_records`"),
        (without("epsilon", "sampling_rate", batch_size=10, num_records=5), "`batch_size=10`"),
        (without("epsilon", num_records=100_000), "1/N = 1/100000"),
        (without("noise_multiplier", num_updates=0), "`num_updates` must be at least 1"),
        (without("noise_multiplier", epsilon=0), "`epsilon`"),
        (without("epsilon", spent=3), "`spent`"),
        (without("epsilon", adjacency="swap"), "`adjacency`"),
        (without("epsilon", "num_updates", epochs=0), "`epochs`"),
        (without("epsilon", delta="x"), "`delta`"),
        (without("epsilon", "sampling_rate", batch_size=2.5, num_records=10), "`batch_size`"),
    ],
)
def test_wrong_combinations_and_values_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidValueError) as raised:
        calculate_privacy(**given)
    assert message in str(raised.value)


def test_nothing_released_costs_nothing() -> None:
    assert calculate_privacy(**without("epsilon", num_updates=0)).epsilon == 0


def test_what_is_read_off_the_text_is_safe() -> None:
    found = calculate_privacy(**without("noise_multiplier", "sampling_rate"), batch_size=7, num_records=999)
    text = str(found)
    shown = float(text.split("noise multiplier")[1].split()[0])
    assert shown >= found.noise_multiplier
    assert float(text.split()[2]) >= found.epsilon
    assert float(text.split("sampling rate")[1].split()[0]) <= found.sampling_rate
    assert "<- solved for" in text.split("noise multiplier")[1].splitlines()[0]
    assert text.count("solved for") == 1


def test_settings_are_plain_values_in_json() -> None:
    found = calculate_privacy(**without("epsilon", noise_multiplier=0.0))
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["epsilon"] is None
    assert values["mechanism"]["kind"] == "composition"
    assert math.isinf(found.epsilon)
