"""Accounting when mechanisms are chosen from earlier outputs: the theorem, and an odometer that rests on it.

Setting (Rogers, Roth, Ullman, Vadhan 2016). An analyst talks to the data in rounds. In round ``i`` it picks a mechanism
from what was released before, and from coins of its own; never from the records, nor from noise or samples that were
not released. Given any past, the mechanism of round ``i`` has Renyi divergence at most ``rho_i(a)`` of order ``a``,
for every pair of neighbours, in both directions. Since the past chooses the mechanism, ``rho_i`` is random, and the
analyst may stop whenever it likes: the pair that a composition of fixed mechanisms would be compared with does not
exist, and the number which that composition gives need not hold.

Theorem. Let ``P`` and ``Q`` be the laws of the whole interaction on two neighbouring data sets, ``L`` the privacy loss
``log(dP/dQ)`` of what was released until a stopping time, and ``R(a)`` the sum of ``rho_i(a)`` until then. Fix delta,
orders ``a_k > 1`` and weights ``w_k >= 0`` with sum 1 before the first round; let ``epsilon`` be the smallest number
with ``exp(l) - exp(epsilon) <= delta * sum_k w_k exp(a_k l - (a_k - 1) R(a_k))`` for every real ``l``. Then, for
every stopping time,

    E_Q[(exp(L) - exp(epsilon))_+] <= delta.

Proof. ``N(a) = exp(a L - (a - 1) R(a))`` is a non-negative supermartingale under ``Q`` that starts at 1: given the
past, ``E_Q[exp(a L_i)] = exp((a - 1) D_a) <= exp((a - 1) rho_i(a))`` (Feldman and Zrnic 2021, Theorem 3.1). So
``W = sum_k w_k N(a_k)`` is one too, and ``E_Q[W] <= 1`` at every stopping time, by optional stopping and Fatou. By the
choice of epsilon, ``(exp(L) - exp(epsilon))_+ <= delta * W`` at every outcome. Take expectations.

With one order, epsilon is the conversion of Canonne, Kamath and Steinke (2020, Proposition 12). With several it is
never more than that conversion at the best order ``a_k`` with ``delta * w_k``: the weights are the price for not
having to know the best order in advance. There has to be some price: a filter that goes on while *any* order is within
the budget that it would have alone can spend more than delta, since the analyst reads off the first output which order
to exhaust (``tests/accounting/test_filter.py`` computes 1.8 times delta for one such analyst).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_dp import _validate
from lightning_dp.accounting import adjacency as adjacencies
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms import Mechanism
from lightning_dp.accounting.mechanisms.base import checked
from lightning_dp.errors import InvalidValueError

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = tuple(1 + 2 ** (k / 2) for k in range(-4, 21))
"""Orders from 1.25 to 1025, spread evenly on the scale of ``log(order - 1)``, for any mechanism."""

_HALVINGS = 45
_ROUNDING = 1 + 1e-12


def renyi(mechanism: Mechanism, orders: Sequence[float], adjacency: Adjacency) -> Floats:
    """Renyi divergences of a mechanism, or of a composition fixed in advance, never below the true ones.

    Args:
        mechanism: What is released.
        orders: Each greater than 1.
        adjacency: Which data sets are neighbours.

    Returns:
        For each order the larger of both directions, ``(orders,)``; ``inf`` where there is none.
    """
    total = np.zeros(len(orders))
    for single, count in mechanism.phases:
        total = _add_up(total, count, _renyi_once(single, tuple(orders), adjacency))
    return total


@lru_cache(maxsize=4096)
def _renyi_once(mechanism: Mechanism, orders: tuple[float, ...], adjacency: Adjacency) -> Floats:
    values: Floats = np.array(mechanism.profile(adjacency).rdp(np.array(orders)), dtype=np.float64)
    values.flags.writeable = False
    return values


def _add_up(total: Floats, count: int, once: Floats) -> Floats:
    """``total + count * once``, both operations rounded upwards; 0 stays 0."""
    if count == 0:
        return total
    more = np.where(once > 0, np.nextafter(count * once, np.inf), 0.0)
    result: Floats = np.where(more > 0, np.nextafter(total + more, np.inf), total)
    return result


class RenyiOdometer:
    """What has been spent so far by mechanisms that may each be chosen from earlier outputs.

    For every delta fixed in advance, and wherever the interaction is stopped, with ``L`` the privacy loss and
    ``epsilon`` the reading at that moment, ``E_Q[(exp(L) - exp(epsilon))_+] <= delta``; see the theorem of this module.
    Two consequences: if the reading at the end can never exceed ``e``, the whole is ``(e, delta)``-differentially
    private; and for every ``e`` fixed in advance, and every set S of outcomes at which the reading is at most ``e``,
    ``P[S] <= exp(e) Q[S] + delta``.

    Hypotheses: parameters, and the decision to stop, are functions of what was released and of independent coins;
    delta and the orders are not. Each delta fixed in advance has its own valid reading; a delta that was picked because
    of its reading has none.

    Args:
        orders: Renyi orders, each greater than 1, equally weighted.
        adjacency: Which data sets are neighbours.
        rows_per_unit: Most records that one unit owns; mechanisms are passed as they are for one record.

    Raises:
        InvalidValueError: An argument is out of range.

    Example:
        >>> from lightning_dp import Gaussian
        >>> odometer = RenyiOdometer()
        >>> odometer.add(Gaussian(20.0), count=50)
        >>> odometer.add(Gaussian(10.0))  # chosen after a look at the first outputs
        >>> round(odometer.epsilon(1e-5), 3)
        1.766
    """

    def __init__(
        self, *, orders: Iterable[float] = ORDERS, adjacency: Adjacency = "add_remove", rows_per_unit: int = 1
    ) -> None:
        self.orders = _checked_orders(orders)
        self.adjacency = adjacencies.checked(adjacency)
        self.rows_per_unit = _validate.integer("rows_per_unit", rows_per_unit, 1)
        self._spent: Floats = np.zeros(len(self.orders))

    @property
    def spent(self) -> Floats:
        """Sum of the Renyi divergences of what was released, for each order, ``(orders,)``."""
        return self._spent.copy()

    def add(self, mechanism: Mechanism, count: int = 1) -> None:
        """Adds ``count`` releases. Call it before the outcome is visible to anyone.

        Args:
            mechanism: What is released; of a composition, everything is fixed before its first outcome is seen.
            count: How many times, at least 1.

        Raises:
            InvalidValueError: An argument is out of range.
            IncomparableError: The mechanism says nothing under the adjacency.
        """
        self._spent = self._with(mechanism, _validate.integer("count", count, 1))

    def epsilon(self, delta: float) -> float:
        """The reading at ``delta``; 0 if nothing was released, infinite if noise was missing.

        Args:
            delta: In (0, 1), fixed in advance.
        """
        return self._reading(self._spent, _validate.delta(delta))

    def epsilon_after(self, mechanism: Mechanism, count: int, *, delta: float) -> float:
        """The reading at ``delta`` that ``count`` more releases, at least 0, would lead to."""
        spent = self._with(mechanism, _validate.integer("count", count, 0))
        return self._reading(spent, _validate.delta(delta))

    def _with(self, mechanism: Mechanism, count: int) -> Floats:
        mechanism = checked("mechanism", mechanism)
        seen = mechanism if self.rows_per_unit == 1 else mechanism.group(self.rows_per_unit)
        return _add_up(self._spent, count, renyi(seen, self.orders, self.adjacency))

    def _reading(self, spent: Floats, delta: float) -> float:
        # Without divergence of one order above 1 the pair is equal, and so is the loss to 0.
        return to_epsilon(spent, self.orders, delta) if spent.any() else 0.0


def to_epsilon(spent: Floats, orders: Sequence[float], delta: float) -> float:
    """The epsilon of the theorem of this module with equal weights, rounded up.

    ``f(l) = exp(l) - delta * sum_k w_k exp(a_k l - (a_k - 1) R_k)`` is concave in ``exp(l)`` and largest where
    ``sum_k a_k exp(c_k + (a_k - 1) l) = 1`` with ``c_k = log(delta w_k) - (a_k - 1) R_k``. For a bracket of that place,
    ``exp(high) - (the sum at low)`` is at least the maximum, however wide the bracket is.
    """
    usable = np.isfinite(spent)
    if not usable.any():
        return math.inf
    above, rho = np.array(orders)[usable] - 1, spent[usable]
    log_weight = math.log(delta) - math.log(len(orders))
    alone = rho - (log_weight + np.log1p(above)) / above  # where one term is 1 by itself
    low, high = float(np.min(alone - math.log(len(orders)) / above)), float(np.min(alone))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if np.exp(above * (middle - alone)).sum() > 1 else (middle, high)
    share = float(np.sum(np.exp(above * (low - alone)) / (1 + above)))  # of exp(low): the sum divided by it
    return max(0.0, (high + math.log1p(-math.exp(low - high) * share)) * _ROUNDING)


def _checked_orders(orders: Iterable[float]) -> tuple[float, ...]:
    if not isinstance(orders, Iterable):
        raise InvalidValueError(
            f"`orders` must be a list of numbers, got {orders!r}. Write ({orders!r},) for one order."
        )
    values = tuple(_validate.positive("orders", order) for order in orders)
    if not values or min(values) <= 1:
        raise InvalidValueError(f"`orders` must hold at least one number, all greater than 1, got {values!r}.")
    return tuple(dict.fromkeys(values))
