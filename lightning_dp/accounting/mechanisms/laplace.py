"""The Laplace mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms.atomic import LEAST_EPSILON, MOST_EPSILON, AtomicMechanism
from lightning_dp.accounting.profile.atoms import AtomicPair, exponential_density, randomized


@dataclass(frozen=True)
class Laplace(AtomicMechanism):
    """Adds independent Laplace noise to the numbers of a sum in which one record adds a vector of bounded L1 norm.

    It is ``1 / noise_multiplier``-DP (Dwork, McSherry, Nissim and Smith, 2006, Theorem 1), and its profile is
    ``1 - exp((epsilon - 1 / noise_multiplier) / 2)`` (Balle, Barthe and Gaboardi, 2018, Theorem 3). In several
    dimensions a move by the bound along one axis is the worst: two independent moves ``b <= a`` have at ``epsilon``,
    with ``c = epsilon - a`` in ``[-b, b]``, ``delta = 1 - exp((c - b) / 2) * (1 + (b - c) / 4)``, less than one by
    ``a + b`` has. Replacing a record moves the sum by up to twice the bound, which doubles epsilon.

    Args:
        noise_multiplier: Scale of the noise over that bound, greater than 0.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        value = _validate.positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", value)

    def pair(self, adjacency: Adjacency) -> AtomicPair:
        """See :meth:`AtomicMechanism.pair`."""
        return _pair((2.0 if adjacency == "replace_one" else 1.0) / max(self.noise_multiplier, 1e-300))

    def group(self, size: int) -> Laplace:
        """The group's records add up to a vector ``size`` times as long."""
        return Laplace(self.noise_multiplier / _validate.integer("size", size, 1))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {"kind": "laplace", "noise_multiplier": self.noise_multiplier}


@lru_cache(maxsize=256)
def _pair(epsilon: float) -> AtomicPair:
    if epsilon > MOST_EPSILON:
        return randomized(0.0, reveals=1.0)
    return exponential_density(max(epsilon, LEAST_EPSILON), height=0.25, edge=0.5)
