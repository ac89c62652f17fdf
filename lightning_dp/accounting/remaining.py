"""How many more releases a budget allows."""

from __future__ import annotations

from lightning_dp import _validate
from lightning_dp.accounting.mechanisms import Composition, Mechanism

_LIMIT = 10_000_000_000


def updates_left(
    update: Mechanism, *, epsilon: float, delta: float, spent: Mechanism | None = None, limit: int | None = None
) -> int:
    """Largest number of updates that keeps the whole within a budget.

    Args:
        update: What one update executes.
        epsilon: The budget, greater than 0.
        delta: In (0, 1).
        spent: What was executed before; nothing if ``None``.
        limit: Stop looking here, for example at the number of updates that are planned.

    Returns:
        The number ``n``, at most ``limit``: ``spent + n * update`` costs at most ``epsilon`` at ``delta``; 0 if
        nothing fits.

    Raises:
        InvalidValueError: An argument is out of range.
    """
    epsilon, delta = _validate.positive("epsilon", epsilon), _validate.delta(delta)
    before = Composition() if spent is None else spent
    upper = _LIMIT if limit is None else _validate.integer("limit", limit, minimum=0)

    def fits(count: int) -> bool:
        # Both are upper bounds, so either may decide; comparing delta is cheaper, since it searches no root.
        total = before + count * update
        return total.delta(epsilon) <= delta or total.epsilon(delta) <= epsilon

    if not fits(0):
        return 0
    if limit is not None and fits(upper):
        return upper
    low, high = 0, min(1, upper)
    while high < upper and fits(high):
        low, high = high, min(2 * high, upper)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
