"""The exponential mechanism."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms.atomic import LEAST_EPSILON, MOST_EPSILON, AtomicMechanism
from lightning_dp.accounting.profile.atoms import AtomicPair, exponential_density, randomized


@dataclass(frozen=True)
class ExponentialMechanism(AtomicMechanism):
    """Chooses an output with probability proportional to ``exp(epsilon * utility / (2 * sensitivity))``.

    With ``epsilon = pure_epsilon`` it is ``epsilon``-DP (McSherry and Talwar, 2007, Theorem 6), and more: its loss
    lies in a range of length ``epsilon`` (Durfee and Rogers, 2019). The worst pairs have the losses ``t`` and
    ``t - epsilon`` for some ``t`` in ``[0, epsilon]`` (Dong, Durfee and Rogers, 2020). The largest of their profiles
    at ``e`` in ``[-epsilon, epsilon]``, at ``t = (epsilon + e) / 2``, is
    ``(exp(epsilon / 2) - exp(e / 2))^2 / (exp(epsilon) - 1)``. It is convex in ``exp(e)``, hence the profile of one
    dominating pair (Zhu, Dong and Wang, 2022, Proposition 8): exact for one release whose utility may go up for some
    outputs and down for others, an upper bound for compositions.

    The sensitivity is the largest change of any output's utility when one record is added, removed or made null.
    Replacing one changes it by up to twice as much, which doubles epsilon.

    Args:
        pure_epsilon: Epsilon at delta 0 of one choice under add/remove, greater than 0.
    """

    pure_epsilon: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "pure_epsilon", _validate.positive("pure_epsilon", self.pure_epsilon))

    def pair(self, adjacency: Adjacency) -> AtomicPair:
        """See :meth:`AtomicMechanism.pair`."""
        return _pair((2.0 if adjacency == "replace_one" else 1.0) * self.pure_epsilon)

    def group(self, size: int) -> ExponentialMechanism:
        """The group's records change each utility by ``size`` times as much."""
        return ExponentialMechanism(min(_validate.integer("size", size, 1) * self.pure_epsilon, sys.float_info.max))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {"kind": "exponential", "pure_epsilon": self.pure_epsilon}


@lru_cache(maxsize=256)
def _pair(epsilon: float) -> AtomicPair:
    if epsilon > MOST_EPSILON:
        return randomized(0.0, reveals=1.0)
    epsilon = max(epsilon, LEAST_EPSILON)
    return exponential_density(epsilon, height=-0.5 / math.expm1(-epsilon), edge=0.0)
