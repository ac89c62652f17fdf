"""How many updates fit: against trying every number."""

from __future__ import annotations

import pytest

from lightning_dp import Gaussian, PoissonSampled, errors, updates_left

UPDATE = PoissonSampled(Gaussian(1.0), 0.05)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("spent", [0, 30])
def test_one_more_update_would_not_fit(epsilon: float, spent: int) -> None:
    count = updates_left(UPDATE, epsilon=epsilon, delta=1e-5, spent=spent * UPDATE)
    costs = [(n * UPDATE).epsilon(1e-5) <= epsilon for n in range(spent, spent + count + 2)]
    assert sum(costs) == (count + 1 if costs[0] else 0)


def test_a_limit_cuts_the_answer() -> None:
    assert updates_left(UPDATE, epsilon=4, delta=1e-5, limit=7) == 7
    assert updates_left(UPDATE, epsilon=4, delta=1e-5, limit=0) == 0


def test_nothing_fits_without_noise_or_after_the_budget_is_spent() -> None:
    assert updates_left(PoissonSampled(Gaussian(0.0), 0.05), epsilon=4, delta=1e-5) == 0
    assert updates_left(UPDATE, epsilon=0.1, delta=1e-5, spent=1000 * UPDATE) == 0


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf"), "3"])
def test_a_budget_must_be_a_positive_number(epsilon: object) -> None:
    with pytest.raises(errors.InvalidValueError, match="epsilon"):
        updates_left(UPDATE, epsilon=epsilon, delta=1e-5)  # type: ignore[arg-type]
