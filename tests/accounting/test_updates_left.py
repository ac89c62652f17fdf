"""How many updates fit: against trying every number, and its neighbours."""

from __future__ import annotations

from random import Random

import pytest

from lightning_dp import Gaussian, Ledger, PoissonSampled, errors, updates_left
from lightning_dp.accounting.profile import bounds
from lightning_dp.accounting.search import Meter

UPDATE = PoissonSampled(Gaussian(1.0), 0.05)
RANDOM = Random(3)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("spent", [0, 30])
def test_one_more_update_would_not_fit(epsilon: float, spent: int) -> None:
    count = updates_left(UPDATE, epsilon=epsilon, delta=1e-5, spent=spent * UPDATE)
    costs = [(n * UPDATE).epsilon(1e-5) <= epsilon for n in range(spent, spent + count + 2)]
    assert sum(costs) == (count + 1 if costs[0] else 0)


@pytest.mark.parametrize(
    ("sigma", "rate", "epsilon", "adjacency"),
    [
        (RANDOM.uniform(0.8, 4), 10 ** RANDOM.uniform(-2.5, 0), 10 ** RANDOM.uniform(0.3, 1.5), adjacency)
        for adjacency in ("add_remove", "replace_one", "zero_out")
        for _ in range(6)
    ],
)
def test_the_neighbour_does_not_fit_however_many_do(sigma: float, rate: float, epsilon: float, adjacency: str) -> None:
    update = PoissonSampled(Gaussian(sigma), rate)
    spent = 3 * PoissonSampled(Gaussian(2.0), 0.01)
    count = updates_left(update, epsilon=epsilon, delta=1e-6, spent=spent, adjacency=adjacency)  # type: ignore[arg-type]
    costs = [(spent + n * update).epsilon(1e-6, adjacency=adjacency) for n in (count, count + 1)]  # type: ignore[call-overload]
    assert count == 0 or costs[0] <= epsilon
    assert costs[1] > epsilon


def test_many_updates_take_few_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []
    read = Meter.read
    monkeypatch.setattr(Meter, "read", lambda self, run: (readings.append(1), read(self, run))[1])
    assert updates_left(PoissonSampled(Gaussian(2.0), 1e-3), epsilon=3, delta=1e-6) > 100_000
    assert len(readings) <= 8


def test_a_limit_that_fits_takes_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []
    read = Meter.read
    monkeypatch.setattr(Meter, "read", lambda self, run: (readings.append(1), read(self, run))[1])
    assert updates_left(UPDATE, epsilon=4, delta=1e-5, limit=7) == 7
    assert len(readings) == 1


def test_a_limit_cuts_the_answer() -> None:
    assert updates_left(UPDATE, epsilon=4, delta=1e-5, limit=0) == 0
    assert updates_left(UPDATE, epsilon=4, delta=1e-5, limit=10**6) == updates_left(UPDATE, epsilon=4, delta=1e-5)


def test_noise_that_costs_nothing_allows_the_most() -> None:
    assert updates_left(Gaussian(1e12), epsilon=1, delta=1e-5) == 10_000_000_000


def test_nothing_fits_without_noise_or_after_the_budget_is_spent() -> None:
    assert updates_left(PoissonSampled(Gaussian(0.0), 0.05), epsilon=4, delta=1e-5) == 0
    assert updates_left(UPDATE, epsilon=0.1, delta=1e-5, spent=1000 * UPDATE) == 0
    assert updates_left(UPDATE, epsilon=4, delta=1e-5, spent=Gaussian(0.0)) == 0


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf"), "3"])
def test_a_budget_must_be_a_positive_number(epsilon: object) -> None:
    with pytest.raises(errors.InvalidValueError, match="epsilon"):
        updates_left(UPDATE, epsilon=epsilon, delta=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_ledger_is_spent_under_its_adjacency_and_unit(adjacency: str) -> None:
    ledger = Ledger(adjacency=adjacency)  # type: ignore[arg-type]
    ledger.record(UPDATE, count=30)
    plain = updates_left(UPDATE, epsilon=5, delta=1e-5, spent=30 * UPDATE, adjacency=adjacency)  # type: ignore[arg-type]
    assert updates_left(UPDATE, epsilon=5, delta=1e-5, spent=ledger) == plain > 0
    assert updates_left(UPDATE, epsilon=5, delta=1e-5, spent=ledger, adjacency=ledger.adjacency) == plain


def test_rows_of_a_unit_count_with_a_ledger() -> None:
    ledger = Ledger(unit="user", rows_per_unit=2)
    ledger.record(Gaussian(20.0))
    count = updates_left(Gaussian(20.0), epsilon=1, delta=1e-5, spent=ledger)
    assert count == updates_left(Gaussian(10.0), epsilon=1, delta=1e-5, spent=Gaussian(10.0))


def test_a_ledger_of_another_adjacency_or_chosen_from_outputs_is_refused() -> None:
    with pytest.raises(errors.IncomparableError, match="replace_one"):
        updates_left(UPDATE, epsilon=5, delta=1e-5, spent=Ledger(), adjacency="replace_one")
    with pytest.raises(errors.LedgerError, match="chosen from earlier outputs"):
        updates_left(UPDATE, epsilon=5, delta=1e-5, spent=Ledger(chosen_from_outputs=True))
    with pytest.raises(errors.InvalidValueError, match="a mechanism or a ledger"):
        updates_left(UPDATE, epsilon=5, delta=1e-5, spent=3)  # type: ignore[arg-type]


def test_the_readings_of_a_search_share_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cold: list[object] = []
    read = bounds.epsilon
    monkeypatch.setattr(bounds, "epsilon", lambda *about: (cold.append(about), read(*about))[1])
    count = updates_left(UPDATE, epsilon=3, delta=1e-5, spent=20 * UPDATE + 5 * Gaussian(9.0))
    assert count > 30
    assert len(cold) <= 4  # what is spent, the first number in each direction, and one more that is close to the budget
