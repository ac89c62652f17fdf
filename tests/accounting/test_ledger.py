"""The ledger only ever grows, survives a round trip, and says what is wrong with a damaged one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from lightning_dp import Gaussian, Ledger, PoissonSampled, errors
from lightning_dp.accounting.odometer import RenyiOdometer

STEP = PoissonSampled(Gaussian(1.0), 0.01)
OTHER = PoissonSampled(Gaussian(2.0), 0.02)


def ledger_of(*counts: int) -> Ledger:
    ledger = Ledger()
    for count, (mechanism, release_id) in zip(counts, [(STEP, "a"), (OTHER, "a"), (STEP, "b")], strict=False):
        ledger.record(mechanism, release_id=release_id, count=count)
    return ledger


def test_an_empty_ledger_costs_nothing() -> None:
    assert Ledger().epsilon(1e-5) == 0
    assert Ledger().guarantee(1e-5).num_updates == 0


def test_a_release_without_noise_costs_everything() -> None:
    ledger = ledger_of(3)
    ledger.record(PoissonSampled(Gaussian(0.0), 0.01))
    assert math.isinf(ledger.epsilon(1e-5))
    assert not ledger.guarantee(1e-5).is_private


def test_epsilon_is_that_of_all_entries_together() -> None:
    ledger = ledger_of(500, 100, 500)
    assert ledger.epsilon(1e-5) == pytest.approx((1000 * STEP + 100 * OTHER).epsilon(1e-5), rel=1e-12)
    assert ledger.num_updates == 1100


def test_one_release_at_a_time_counts_like_many_at_once() -> None:
    ledger = Ledger()
    release_id = ledger.record(STEP)
    for _ in range(9):
        assert ledger.record(STEP, release_id=release_id) == release_id
    assert len(ledger.entries) == 1
    assert ledger.entries[0].count == 10


def test_the_state_comes_back_as_it_was() -> None:
    ledger = ledger_of(5, 6, 7)
    ledger.stamp("a reason")
    other = Ledger()
    other.merge(ledger.state_dict())
    assert other.entries == ledger.entries
    assert other.stamps == ("a reason",)
    assert other.guarantee(1e-5) == ledger.guarantee(1e-5)


@pytest.mark.parametrize(
    ("mine", "theirs", "together"),
    [((5,), (3,), [5]), ((3,), (5,), [5]), ((5, 1), (3, 4), [5, 4]), ((5,), (2, 0, 7), [5, 7]), ((), (4,), [4])],
)
def test_merging_keeps_the_larger_count_of_each_release(
    mine: tuple[int, ...], theirs: tuple[int, ...], together: list[int]
) -> None:
    ledger, other = Ledger(), Ledger()
    for target, counts in ((ledger, mine), (other, theirs)):
        for count, (mechanism, release_id) in zip(counts, [(STEP, "a"), (OTHER, "a"), (STEP, "b")], strict=False):
            if count:
                target.record(mechanism, release_id=release_id, count=count)
    ledger.merge(other.state_dict())
    assert sorted(entry.count for entry in ledger.entries) == sorted(together)


def damaged(**changes: Any) -> dict[str, Any]:
    state = copy.deepcopy(ledger_of(5).state_dict())
    for name, value in changes.items():
        if name in state:
            state[name] = value
        else:
            state["entries"][0][name] = value
    return state


@pytest.mark.parametrize(
    "changes",
    [
        {"count": -1},
        {"count": 0},
        {"count": "5"},
        {"count": 2.5},
        {"mechanism": {"kind": "unknown"}},
        {"mechanism": None},
        {"entries": [{}]},
        {"entries": 3},
        {"adjacency": "nonsense"},
        {"unit": ""},
        {"unit": None},
        {"rows_per_unit": 0},
        {"rows_per_unit": 5},
        {"chosen_from_outputs": 1},
        {"format": 99},
        {"format": None},
        {"stamps": None},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    ledger = ledger_of(5)
    before = ledger.state_dict()
    with pytest.raises(errors.LedgerError):
        ledger.merge(damaged(**changes))
    assert ledger.state_dict() == before


def test_a_state_without_what_it_must_say_is_refused() -> None:
    for name in ledger_of(5).state_dict():
        state = ledger_of(5).state_dict()
        del state[name]
        with pytest.raises(errors.LedgerError, match=name):
            Ledger().merge(state)


def test_a_state_of_the_first_format_is_read() -> None:
    state = ledger_of(5, 6).state_dict()
    del state["rows_per_unit"], state["chosen_from_outputs"]
    ledger = Ledger()
    ledger.merge({**state, "format": 1})
    assert ledger.entries == ledger_of(5, 6).entries


@pytest.mark.parametrize("state", [{}, {"entries": []}, 5, None])
def test_something_that_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(errors.LedgerError):
        Ledger().merge(state)


def test_a_delta_that_would_publish_a_record_is_refused_where_the_size_is_known() -> None:
    assert ledger_of(5).guarantee(0.009, num_records=100).num_records == 100
    with pytest.raises(errors.InvalidValueError, match="1/100"):
        ledger_of(5).guarantee(0.01, num_records=100)


def test_running_totals_are_those_of_the_entries() -> None:
    ledger = ledger_of(5, 6, 7)
    ledger.record(2 * STEP + Gaussian(3.0), release_id="c", count=10)
    ledger.merge(ledger_of(50, 1, 9))
    assert dict(ledger._phases()) == {STEP: 50 + 9 + 20, OTHER: 6, Gaussian(3.0): 10}
    total = sum((entry.count * entry.mechanism for entry in ledger.entries), 0 * STEP)
    assert ledger.composition() == total


# --- adjacency and unit


OWNED = {"unit": "user", "rows_per_unit": 5}


@pytest.mark.parametrize(
    "settings",
    [
        {"adjacency": "swap"},
        {"adjacency": None},
        {"unit": ""},
        {"unit": 5},
        {"unit": "user", "rows_per_unit": 0},
        {"unit": "user", "rows_per_unit": 2.0},
        {"rows_per_unit": 2},
        {"chosen_from_outputs": "yes"},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidValueError, match=list(settings)[-1]):
        Ledger(**settings)


def test_epsilon_is_for_the_adjacency_of_the_ledger() -> None:
    ledger = Ledger(adjacency="replace_one")
    ledger.record(Gaussian(4.0), count=3)
    expected = (3 * Gaussian(4.0)).epsilon(1e-5, adjacency="replace_one")
    assert ledger.epsilon(1e-5) == ledger.guarantee(1e-5).epsilon == expected
    assert ledger.guarantee(1e-5).adjacency == "replace_one"


def test_epsilon_is_for_all_rows_of_a_unit() -> None:
    ledger = Ledger(**OWNED)
    ledger.record(STEP, count=30)
    assert ledger.epsilon(1e-5) == (30 * STEP).group(5).epsilon(1e-5)
    assert "unit: one user (at most 5 records)" in str(ledger.guarantee(1e-5))


def test_kind_and_rows_survive_a_round_trip() -> None:
    ledger = Ledger(adjacency="zero_out", **OWNED)
    ledger.record(Gaussian(9.0))
    other = Ledger(adjacency="zero_out", **OWNED)
    other.merge(ledger.state_dict())
    assert other.state_dict() == ledger.state_dict()


@pytest.mark.parametrize("as_state", [True, False])
@pytest.mark.parametrize(
    "settings", [{"adjacency": "replace_one"}, {"unit": "user"}, {"unit": "user", "rows_per_unit": 3}], ids=str
)
def test_ledgers_of_different_kinds_do_not_merge(settings: dict[str, Any], as_state: bool) -> None:
    ledger, other = ledger_of(5), Ledger(**settings, chosen_from_outputs=True)
    other.record(STEP, count=9)
    other.stamp("a reason")
    before = ledger.state_dict()
    with pytest.raises(errors.IncomparableError, match=next(iter(settings))):
        ledger.merge(other.state_dict() if as_state else other)
    assert ledger.state_dict() == before


# --- mechanisms chosen from earlier outputs


def odometer_reading(delta: float, *steps: tuple[float, int]) -> float:
    odometer = RenyiOdometer()
    for sigma, count in steps:
        odometer.add(Gaussian(sigma), count)
    return odometer.epsilon(delta)


def chosen(*, late: bool = True) -> Ledger:
    ledger = Ledger(chosen_from_outputs=not late)
    ledger.record(Gaussian(10.0), release_id="a", count=20)
    ledger.record(Gaussian(15.0), release_id="a", chosen_from_outputs=late)
    return ledger


@pytest.mark.parametrize("late", [True, False])
def test_choosing_from_outputs_switches_to_the_odometer_for_all_entries(late: bool) -> None:
    ledger = chosen(late=late)
    assert ledger.epsilon(1e-5) == pytest.approx(odometer_reading(1e-5, (10.0, 20), (15.0, 1)), rel=1e-12)
    assert ledger.epsilon(1e-5) > (20 * Gaussian(10.0) + Gaussian(15.0)).epsilon(1e-5)
    guarantee = ledger.guarantee(1e-5)
    assert guarantee.basis == "odometer"
    assert "adaptively chosen parameters: Renyi odometer" in str(guarantee)
    assert "odometer" not in str(ledger_of(5).guarantee(1e-5))


def test_there_is_no_way_back_from_the_odometer() -> None:
    ledger = chosen()
    ledger.record(Gaussian(10.0), release_id="b", chosen_from_outputs=False)
    ledger.merge(ledger_of(3))
    ledger.merge(ledger_of(3).state_dict())
    assert ledger.chosen_from_outputs


@pytest.mark.parametrize("as_state", [True, False])
def test_the_switch_survives_a_merge_even_of_known_entries(as_state: bool) -> None:
    ledger = Ledger()
    ledger.record(Gaussian(10.0), release_id="a", count=20)
    ledger.record(Gaussian(15.0), release_id="a")
    ledger.merge(chosen().state_dict() if as_state else chosen())
    assert ledger.chosen_from_outputs
    assert ledger.guarantee(1e-5) == chosen().guarantee(1e-5)


def test_the_odometer_follows_entries_and_merges() -> None:
    ledger = chosen()
    first = ledger.epsilon(1e-5)
    assert ledger.epsilon(1e-5) == first
    ledger.record(Gaussian(10.0), release_id="a", count=5)
    other = Ledger()
    other.record(Gaussian(10.0), release_id="a", count=30)
    other.record(Gaussian(8.0), release_id="b", count=2)
    ledger.merge(other)
    expected = odometer_reading(1e-5, (10.0, 30), (15.0, 1), (8.0, 2))
    assert ledger.epsilon(1e-5) == pytest.approx(expected, rel=1e-12)
    assert ledger.epsilon(1e-5) > first


def test_an_odometer_reads_for_all_rows_of_a_unit() -> None:
    ledger = Ledger(**OWNED, chosen_from_outputs=True)
    ledger.record(Gaussian(20.0), count=3)
    assert ledger.epsilon(1e-5) == pytest.approx(odometer_reading(1e-5, (4.0, 3)), rel=1e-12)


def test_what_was_chosen_from_outputs_is_not_handed_out_as_a_fixed_composition() -> None:
    with pytest.raises(errors.LedgerError, match=r"understates.*`ledger.filter"):
        chosen().composition()


def test_a_filter_starts_from_what_the_ledger_holds() -> None:
    budget = chosen().filter(epsilon=3.0, delta=1e-5)
    assert budget.spent == pytest.approx(chosen().epsilon(1e-5), rel=1e-12)
    assert budget.fits(Gaussian(20.0))
    assert Ledger().filter(epsilon=3.0, delta=1e-5).spent == 0
    with pytest.raises(errors.BudgetExceededError):
        chosen().filter(epsilon=2.0, delta=1e-5)


def test_a_filter_counts_all_rows_of_a_unit() -> None:
    ledger = Ledger(**OWNED)
    ledger.record(Gaussian(50.0), count=3)
    budget = ledger.filter(epsilon=8.0, delta=1e-5)
    budget.spend(Gaussian(50.0))
    assert budget.spent == pytest.approx(odometer_reading(1e-5, (10.0, 4)), rel=1e-12)


def test_repr_shows_what_was_released_to_whom():
    ledger = Ledger(adjacency="replace_one", unit="user")
    ledger.record(Gaussian(2.0), count=3)
    shown = "Ledger(Composition(parts=((Gaussian(noise_multiplier=2.0), 3),)), adjacency='replace_one', unit='user'"
    assert repr(ledger).startswith(shown)
