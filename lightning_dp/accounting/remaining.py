"""How many more releases a budget allows."""

from __future__ import annotations

import math

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.budget import asked_budget
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Mechanism
from lightning_dp.accounting.mechanisms.base import checked
from lightning_dp.accounting.search import MOST_UPDATES, Bracket, Knob, Meter, search


def updates_left(
    update: Mechanism,
    *,
    epsilon: float,
    delta: float,
    spent: Mechanism | Ledger | None = None,
    limit: int | None = None,
    adjacency: Adjacency | None = None,
) -> int:
    """Largest number of updates that keeps the whole within a budget.

    Args:
        update: What one update executes.
        epsilon: The budget, greater than 0.
        delta: In (0, 1).
        spent: What was released about the same records before; a mechanism, or a ledger, whose adjacency and unit are
            kept; nothing if ``None``.
        limit: Stop looking here, for example at the number of updates that are planned; 10 billion if ``None``.
        adjacency: Which data sets are neighbours; that of the ledger, or ``"add_remove"``, if ``None``.

    Returns:
        The number ``n``, at most ``limit``: ``spent + n * update`` costs at most ``epsilon`` at ``delta``, and one
        update more would cost more; 0 if nothing fits.

    Raises:
        InvalidValueError: An argument is out of range.
        IncomparableError: The ledger is for another adjacency.
        LedgerError: Mechanisms in the ledger were chosen from outputs, so that no fixed plan continues it.

    Example:
        >>> from lightning_dp import Gaussian, PoissonSampled
        >>> updates_left(PoissonSampled(Gaussian(1.0), 0.01), epsilon=2, delta=1e-5)
        1202
    """
    update = checked("update", update)
    budget = asked_budget(epsilon, delta, spent, adjacency)
    most = MOST_UPDATES if limit is None else _validate.integer("limit", limit, minimum=0)
    spent_epsilon = budget.spent_epsilon
    if most == 0 or spent_epsilon >= budget.epsilon:
        return 0
    found = search_updates(Meter(budget, spent_epsilon), update, most, guess=None if limit is None else most)
    return 0 if found.fits is None else int(found.fits.value)


def search_updates(meter: Meter, update: Mechanism, most: int, *, guess: int | None = None) -> Bracket:
    """The largest number of updates that fits, up to ``most``.

    Args:
        meter: The budget.
        update: What one update executes.
        most: At least 1.
        guess: The number to try first; what one large number of updates tells if ``None``.
    """
    knob = Knob(
        run=lambda count: int(count) * update,
        place=lambda count: math.log(count) / 2,
        value=lambda place: min(max(math.floor(math.exp(2 * place)), 1), most),
        cheapest=1,
        dearest=most,
        whole=True,
    )
    return search(meter, knob, min(guess or 1000, most))
