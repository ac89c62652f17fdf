"""The budget that a caller names: what everything may cost, and what was released before."""

from __future__ import annotations

from lightning_dp import _validate
from lightning_dp.accounting import adjacency as adjacencies
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Composition, Mechanism
from lightning_dp.accounting.search import Budget, Spent
from lightning_dp.errors import IncomparableError, InvalidValueError


def asked_budget(epsilon: float, delta: float, spent: Mechanism | Ledger | None, adjacency: Adjacency | None) -> Budget:
    """The budget, each argument checked; see :func:`asked_spent`.

    Raises:
        InvalidValueError: An argument is out of range.
    """
    return Budget(
        epsilon=_validate.positive("epsilon", epsilon),
        delta=_validate.delta(delta),
        spent=asked_spent(spent, adjacency),
    )


def asked_spent(spent: Mechanism | Ledger | None, adjacency: Adjacency | None) -> Spent:
    """What was released before, and how the whole is read.

    Args:
        spent: A mechanism, or a ledger, whose adjacency and unit are kept; nothing if ``None``.
        adjacency: That of the ledger, or ``"add_remove"``, if ``None``.

    Raises:
        InvalidValueError: An argument is of another type.
        IncomparableError: The ledger is for another adjacency.
        LedgerError: Mechanisms in the ledger were chosen from outputs, so that no fixed plan continues it.
    """
    wanted = None if adjacency is None else adjacencies.checked(adjacency)
    if isinstance(spent, Ledger):
        if wanted not in (None, spent.adjacency):
            raise IncomparableError(
                f"`adjacency={wanted}` is not that of the ledger, {spent.adjacency}. What was spent under one cannot be"
                " added to what is planned under another; leave `adjacency` out."
            )
        return Spent(spent.composition(), spent.adjacency, spent.rows_per_unit)
    if spent is not None and not isinstance(spent, Mechanism):
        raise InvalidValueError(
            f"`spent` must be a mechanism or a ledger, got {spent!r} of type {type(spent).__name__}."
        )
    return Spent(Composition() if spent is None else spent, wanted or "add_remove")
