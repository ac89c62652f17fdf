"""The ledger only ever grows, survives a round trip, and says what is wrong with a damaged one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from lightning_dp import Gaussian, Ledger, PoissonSampled, errors
from lightning_dp.accounting.guarantee import format_epsilon

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
        {"adjacency": "replace_one"},
        {"unit": "user"},
        {"format": 99},
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


@pytest.mark.parametrize("state", [{}, {"entries": []}, 5, None])
def test_something_that_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(errors.LedgerError):
        Ledger().merge(state)


def test_a_delta_that_would_publish_a_record_is_refused_where_the_size_is_known() -> None:
    assert ledger_of(5).guarantee(0.009, num_records=100).num_records == 100
    with pytest.raises(errors.InvalidValueError, match="1/100"):
        ledger_of(5).guarantee(0.01, num_records=100)


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(1.82821, "1.8283"), (2.9999999, "3.0000"), (3.00001, "3.0001"), (0.0, "0.0000"), (math.inf, "infinite")],
)
def test_epsilon_is_shown_rounded_up(epsilon: float, shown: str) -> None:
    assert format_epsilon(epsilon) == shown


def test_a_guarantee_says_whom_it_protects_and_from_what() -> None:
    text = str(ledger_of(1000).guarantee(1e-5, num_records=60_000))
    assert "(1.8283, 1e-05)" in text
    assert all(part in text for part in ("one record", "add_remove", "60,000", "1,000 executed updates"))
