"""A budget for mechanisms that are chosen from earlier outputs; the theorem is in the module of the odometer."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms import Mechanism
from lightning_dp.accounting.odometer import ORDERS, RenyiOdometer, to_epsilon
from lightning_dp.accounting.search import MOST_UPDATES
from lightning_dp.errors import BudgetExceededError, InvalidValueError


class RenyiFilter:
    """Lets releases pass, each possibly chosen from earlier outputs, as long as the whole stays within a budget.

    Whoever asks :meth:`spend` before every release, and does without the release when it raises, is
    ``(epsilon, delta)``-differentially private, whatever was chosen in between. This is a
    :class:`~lightning_dp.accounting.odometer.RenyiOdometer` stopped before it would read more than ``epsilon``, so that
    the reading at the end never does. With one order ``a`` it is the filter of Feldman and Zrnic (2021): releases pass
    while their divergences of that order add up to at most the ``B`` at which the conversion of Canonne, Kamath and
    Steinke (2020) gives ``(epsilon, delta)``.

    Args:
        epsilon: The budget, greater than 0, fixed in advance.
        delta: In (0, 1), fixed in advance.
        orders: Renyi orders, each greater than 1, fixed in advance. One order is best where it is known which one the
            releases will exhaust; the default costs 10 to 30 % of epsilon more, for any.
        adjacency: Which data sets are neighbours.
        rows_per_unit: Most records that one unit owns; mechanisms are passed as they are for one record.

    Raises:
        InvalidValueError: An argument is out of range, or no release at all could pass under these orders.

    Example:
        >>> from lightning_dp import Gaussian
        >>> budget = RenyiFilter(epsilon=2.0, delta=1e-5)
        >>> budget.spend(Gaussian(10.0), count=10)
        >>> budget.fits(Gaussian(2.0))
        False
        >>> budget.fits(Gaussian(5.0))
        True
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        orders: Iterable[float] = ORDERS,
        adjacency: Adjacency = "add_remove",
        rows_per_unit: int = 1,
    ) -> None:
        self.budget = _validate.positive("epsilon", epsilon)
        self.delta = _validate.delta(delta)
        self._odometer = RenyiOdometer(orders=orders, adjacency=adjacency, rows_per_unit=rows_per_unit)
        smallest = to_epsilon(self._odometer.spent, self._odometer.orders, self.delta)
        if smallest > self.budget:
            raise InvalidValueError(
                f"`epsilon={epsilon:g}` is out of reach at delta = {delta:g} with orders up to"
                f" {max(self._odometer.orders):g}: even a release that costs nothing counts as {smallest:.4g}."
                " Pass larger `orders`."
            )

    @property
    def spent(self) -> float:
        """The odometer's reading at ``delta``, at most the budget."""
        return self._odometer.epsilon(self.delta)

    @property
    def remaining(self) -> float:
        """The part of epsilon that is left; what a release takes from it depends on what came before."""
        return self.budget - self.spent

    def fits(self, mechanism: Mechanism, count: int = 1) -> bool:
        """Whether ``count`` more releases stay within the budget.

        Args:
            mechanism: What would be released.
            count: How many times, at least 0.
        """
        return self._odometer.epsilon_after(mechanism, count, delta=self.delta) <= self.budget

    def spend(self, mechanism: Mechanism, count: int = 1) -> None:
        """Takes ``count`` releases from the budget. Call it before the outcome is visible to anyone.

        Args:
            mechanism: What is to be released.
            count: How many times, at least 1.

        Raises:
            InvalidValueError: An argument is out of range.
            BudgetExceededError: They do not fit; nothing was spent, and they must not be released.
        """
        # PRIVACY: refused as a whole and before it is visible; a filter that releases first has released too much.
        if not self.fits(mechanism, _validate.integer("count", count, 1)):
            raise BudgetExceededError(
                f"{count} x {mechanism!r} does not fit into epsilon = {self.budget:g} at delta = {self.delta:g}, of"
                f" which {self.spent:.6g} is spent. Choose more noise, or stop here."
            )
        self._odometer.add(mechanism, count)

    def updates_left(self, mechanism: Mechanism, *, limit: int | None = None) -> int:
        """Largest number of further releases of one mechanism that fit.

        Args:
            mechanism: What would be released each time.
            limit: Stop looking here; 10 billion if ``None``.
        """
        limit = MOST_UPDATES if limit is None else _validate.integer("limit", limit, 0)
        if self.fits(mechanism, limit):
            return limit
        low, high = 0, 1
        while high < limit and self.fits(mechanism, high):
            low, high = high, min(2 * high, limit)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(mechanism, middle) else (low, middle)
        return low
