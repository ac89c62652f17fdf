"""The Gaussian mechanism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency, Direction
from lightning_dp.accounting.mechanisms.base import SingleMechanism
from lightning_dp.accounting.profile import GaussianLoss, Loss


@dataclass(frozen=True)
class Gaussian(SingleMechanism):
    """Adds Gaussian noise to a sum in which one record adds a vector of bounded L2 norm.

    Replacing a record moves the sum by up to twice that bound, so that ``replace_one`` costs more than ``add_remove``.

    Args:
        noise_multiplier: Standard deviation of the noise over that bound; 0 means no noise, hence no privacy.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        value = _validate.non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", value)

    def loss(self, adjacency: Adjacency, direction: Direction) -> Loss:
        """See :meth:`SingleMechanism.loss`."""
        distance = 2.0 if direction == "replace" else 1.0
        return GaussianLoss(distance / self.noise_multiplier if self.noise_multiplier > 0 else math.inf)

    def group(self, size: int) -> Gaussian:
        """The group's records add up to a vector ``size`` times as long."""
        return Gaussian(self.noise_multiplier / _validate.integer("size", size, 1))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {"kind": "gaussian", "noise_multiplier": self.noise_multiplier}
