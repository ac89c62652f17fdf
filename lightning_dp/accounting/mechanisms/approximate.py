"""A mechanism of which nothing is known but a guarantee."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting import adjacency as adjacencies
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms.atomic import MOST_EPSILON, AtomicMechanism
from lightning_dp.accounting.profile.atoms import AtomicPair, randomized
from lightning_dp.errors import IncomparableError

_TWO_STEPS = {("add_remove", "replace_one"), ("add_remove", "zero_out"), ("zero_out", "replace_one")}


@dataclass(frozen=True)
class ApproximateDP(AtomicMechanism):
    """Any mechanism that is ``(epsilon, delta)``-DP, for example one of another library.

    The least private of them gives everything away with probability ``delta`` and is randomized response otherwise.
    That pair dominates all others (Kairouz, Oh and Viswanath, 2015), so compositions are optimal for what is known.

    A guarantee under ``add_remove`` gives one under ``zero_out`` and ``replace_one``, and one under ``zero_out`` gives
    one under ``replace_one``, since two steps lead from one data set to the other, through the one without the record:
    ``2 * epsilon`` at ``delta * (1 + exp(epsilon))``, and somewhat less where epsilon is below that. No guarantee
    follows in the other directions.

    Args:
        stated_epsilon: Epsilon of the guarantee, at least 0.
        stated_delta: Its delta, in [0, 1].
        adjacency: The neighbours for which it was stated.
    """

    stated_epsilon: float
    stated_delta: float
    adjacency: Adjacency = "add_remove"

    def __post_init__(self) -> None:
        object.__setattr__(self, "stated_epsilon", _validate.non_negative("stated_epsilon", self.stated_epsilon))
        object.__setattr__(self, "stated_delta", _validate.fraction("stated_delta", self.stated_delta))
        adjacencies.checked(self.adjacency)

    def pair(self, adjacency: Adjacency) -> AtomicPair:
        """See :meth:`AtomicMechanism.pair`."""
        if adjacency == self.adjacency:
            return _pair(self.stated_epsilon, self.stated_delta)
        if (self.adjacency, adjacency) in _TWO_STEPS:
            return _two_steps(self.stated_epsilon, self.stated_delta)
        raise IncomparableError(
            f"{self!r} was stated under {self.adjacency!r}, which says nothing under {adjacency!r}."
            f" Ask for the guarantee under {self.adjacency!r}, or state one that was proved under {adjacency!r}."
        )

    def unsampled(self, adjacency: Adjacency) -> Adjacency:
        """See :meth:`AtomicMechanism.unsampled`."""
        if self.adjacency == "replace_one":
            raise IncomparableError(
                f"{self!r} cannot be sampled: being in the sample or not is no replacement of a record, so the stated"
                " guarantee does not bound it. State one that was proved under 'add_remove' or 'zero_out'."
            )
        return self.adjacency

    def group(self, size: int) -> ApproximateDP:
        """``size`` steps lead to data without the group.

        The guarantee is ``size * epsilon`` and ``delta * (exp(size * epsilon) - 1) / (exp(epsilon) - 1)``.
        """
        size = _validate.integer("size", size, 1)
        return ApproximateDP(*_several(self.stated_epsilon, self.stated_delta, size), self.adjacency)

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {
            "kind": "approximate_dp",
            "stated_epsilon": self.stated_epsilon,
            "stated_delta": self.stated_delta,
            "adjacency": self.adjacency,
        }


def _several(epsilon: float, delta: float, steps: int) -> tuple[float, float]:
    total = min(steps * epsilon, sys.float_info.max)
    if delta == 0 or steps == 1:
        return total, delta
    growth = math.expm1(-total) / math.expm1(-epsilon) if epsilon > 0 else float(steps)
    log_delta = math.log(delta) + (total - epsilon) + math.log(growth)
    return total, math.exp(log_delta) * (1 + 1e-14) if log_delta < 0 else 1.0


@lru_cache(maxsize=256)
def _pair(epsilon: float, delta: float) -> AtomicPair:
    return randomized(epsilon, reveals=delta) if epsilon <= MOST_EPSILON else randomized(0.0, reveals=1.0)


@lru_cache(maxsize=256)
def _two_steps(epsilon: float, delta: float) -> AtomicPair:
    return _pair(epsilon, delta).chained(_pair(epsilon, delta).reverse)
