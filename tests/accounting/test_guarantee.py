"""Guarantees are compared and added only where both speak of the same thing, and say what they are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_dp import Gaussian, Guarantee, Ledger, PoissonSampled, errors
from lightning_dp.accounting.guarantee import format_epsilon

STEP = PoissonSampled(Gaussian(1.0), 0.01)
OTHER_KINDS = [
    {"adjacency": "replace_one"},
    {"adjacency": "zero_out"},
    {"unit": "user"},
    {"unit": "user", "rows_per_unit": 5},
]


def guarantee(**changes: Any) -> Guarantee:
    return Guarantee(**{"epsilon": 1.0, "delta": 1e-5, "num_updates": 10, **changes})


@pytest.mark.parametrize(
    ("weaker", "expected"),
    [
        ({}, True),
        ({"epsilon": 2.0}, True),
        ({"delta": 1e-4}, True),
        ({"epsilon": math.inf, "delta": 1e-4}, True),
        ({"epsilon": 0.5}, False),
        ({"delta": 1e-6}, False),
        ({"epsilon": 2.0, "delta": 1e-6}, False),
        ({"epsilon": 0.5, "delta": 1e-4}, False),
        ({"stamps": ("a seed",)}, True),
        ({"num_updates": 3}, True),
    ],
    ids=str,
)
def test_a_guarantee_implies_those_whose_numbers_are_no_smaller(weaker: dict[str, Any], expected: bool) -> None:
    assert guarantee().implies(guarantee(**weaker)) is expected


def test_what_weakens_a_guarantee_is_not_forgotten_in_a_comparison() -> None:
    assert not guarantee(stamps=("a seed",)).implies(guarantee(epsilon=9.0))
    assert not guarantee(num_records=100).implies(guarantee())
    assert not guarantee(num_records=100).implies(guarantee(num_records=200))
    assert guarantee(num_records=100).implies(guarantee(num_records=100))
    assert guarantee().implies(guarantee(num_records=100))


@pytest.mark.parametrize("kind", OTHER_KINDS, ids=str)
def test_guarantees_of_different_kinds_are_neither_compared_nor_added(kind: dict[str, Any]) -> None:
    for mine, theirs in ((guarantee(), guarantee(**kind)), (guarantee(**kind), guarantee())):
        with pytest.raises(errors.IncomparableError, match=f"`{next(iter(kind))}` is"):
            mine.implies(theirs)
        with pytest.raises(errors.IncomparableError):
            mine + theirs


def test_a_sum_adds_the_numbers_and_keeps_what_weakens_either() -> None:
    one = guarantee(stamps=("x", "y"), num_records=100, unit="user", rows_per_unit=3)
    two = guarantee(epsilon=0.5, delta=2e-5, num_updates=7, stamps=("y", "z"), unit="user", rows_per_unit=3)
    together = one + two
    assert (together.epsilon, together.num_updates, together.num_records) == (1.5, 17, 100)
    assert together.delta == pytest.approx(3e-5)
    assert together.stamps == ("x", "y", "z")
    assert (together.unit, together.rows_per_unit, together.basis) == ("user", 3, "composition")
    assert (one + guarantee(basis="odometer", unit="user", rows_per_unit=3)).basis == "odometer"


def test_a_sum_covers_what_both_mechanisms_cost_together() -> None:
    ledger = Ledger()
    ledger.record(STEP, count=500)
    once = ledger.guarantee(1e-5)
    ledger.record(STEP, count=500)
    assert ledger.epsilon(2e-5) < (once + once).epsilon


def test_a_sum_that_says_nothing_is_refused() -> None:
    with pytest.raises(errors.InvalidValueError, match="below 1"):
        guarantee(delta=0.5) + guarantee(delta=0.5)
    with pytest.raises(errors.IncomparableError, match="num_records"):
        guarantee(num_records=100) + guarantee(num_records=200)
    with pytest.raises(TypeError):
        guarantee() + 1.0  # type: ignore[operator]


@pytest.mark.parametrize(
    "bad",
    [
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"epsilon": "1"},
        {"delta": 1.0},
        {"delta": -1e-9},
        {"num_updates": -1},
        {"num_records": 1.5},
        {"adjacency": "swap"},
        {"unit": " "},
        {"rows_per_unit": 2},
        {"basis": "guess"},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidValueError, match=next(iter(bad))):
        guarantee(**bad)


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(1.82821, "1.8283"), (2.9999999, "3.0000"), (3.00001, "3.0001"), (0.0, "0.0000"), (math.inf, "infinite")],
)
def test_epsilon_is_shown_rounded_up(epsilon: float, shown: str) -> None:
    assert format_epsilon(epsilon) == shown


def test_a_guarantee_says_whom_it_protects_and_from_what() -> None:
    ledger = Ledger()
    ledger.record(STEP, count=1000)
    text = str(ledger.guarantee(1e-5, num_records=60_000))
    assert "(1.8283, 1e-05)" in text
    assert all(part in text for part in ("one record", "add_remove", "60,000", "1,000 executed updates"))
