"""Amplification by Poisson sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency, Direction
from lightning_dp.accounting.mechanisms.atomic import AtomicMechanism
from lightning_dp.accounting.mechanisms.base import SingleMechanism
from lightning_dp.accounting.mechanisms.gaussian import Gaussian
from lightning_dp.accounting.mechanisms.randomized_response import RandomizedResponse
from lightning_dp.accounting.mechanisms.sampled_group import SampledGroup
from lightning_dp.accounting.profile.atoms import AtomicPair, replaced_sampled
from lightning_dp.accounting.profile.losses import Loss, SampledGaussianLoss
from lightning_dp.errors import InvalidValueError


@dataclass(frozen=True)
class PoissonSampled(SingleMechanism):
    """Applies a mechanism to a random subset that each record joins independently.

    Where adding and removing a record are looked at, the profile follows exactly from the mechanism's own (Li, Qardaji
    and Su, 2012; Balle, Barthe and Gaboardi, 2018, Theorem 8). Replacing a record is removing and adding one, which
    bounds it by the two profiles; for Gaussian and Laplace noise opposite values attain that bound. For the others the
    bound by joint convexity is taken into account too (Balle, Barthe and Gaboardi, 2018, Theorem 2). A sample of a
    sample is one sample at the product of the rates.

    Args:
        mechanism: The single mechanism that sees the subset.
        sampling_rate: Probability of each record to be in the subset, in (0, 1]; 1 is the plain mechanism.
    """

    mechanism: SingleMechanism
    sampling_rate: float

    def __post_init__(self) -> None:
        rate = _validate.probability("sampling_rate", self.sampling_rate)
        if isinstance(self.mechanism, PoissonSampled):  # a record is in both samples with the product of the rates
            rate = _validate.probability("sampling_rate", rate * self.mechanism.sampling_rate)
            object.__setattr__(self, "mechanism", self.mechanism.mechanism)
        if not isinstance(self.mechanism, Gaussian | AtomicMechanism):
            raise InvalidValueError(
                f"`mechanism` must be one release, such as a Gaussian or a Laplace, got {self.mechanism!r}."
                " Sample the single step and compose afterwards, for example 100 * PoissonSampled(Gaussian(1.0), 0.01)."
            )
        object.__setattr__(self, "sampling_rate", rate)

    def loss(self, adjacency: Adjacency, direction: Direction) -> Loss:
        """See :meth:`SingleMechanism.loss`."""
        if isinstance(self.mechanism, AtomicMechanism):
            pair = _sampled(self.mechanism, self.sampling_rate, adjacency)
            return pair.reverse.loss if direction == "add" else pair.loss
        if not isinstance(self.mechanism, Gaussian) or self.sampling_rate == 1 or self.mechanism.noise_multiplier == 0:
            return self.mechanism.loss(adjacency, direction)
        return SampledGaussianLoss(self.sampling_rate, self.mechanism.noise_multiplier, direction)

    def group(self, size: int) -> SingleMechanism:
        """The group's records are sampled one by one.

        With Gaussian noise the answer is a :class:`SampledGroup`. Otherwise it is an upper bound: a group that is
        sampled when any of its records is, and then counts in full. Hockey-stick divergences are jointly convex, and a
        part of the group changes less. Answers that its records give one by one are bounded by one of the whole group.
        """
        size = _validate.integer("size", size, 1)
        mechanism, rate = self.mechanism, self.sampling_rate
        if size == 1:
            return self
        if isinstance(mechanism, Gaussian) and rate < 1 and mechanism.noise_multiplier > 0:
            return SampledGroup(mechanism.noise_multiplier, rate, size)
        any_of_them = -math.expm1(size * math.log1p(-rate)) if rate < 1 else 1.0
        whole = mechanism.pooled(size) if isinstance(mechanism, RandomizedResponse) else mechanism.group(size)
        return PoissonSampled(whole, any_of_them)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {
            "kind": "poisson_sampled",
            "mechanism": self.mechanism.to_dict(),
            "sampling_rate": self.sampling_rate,
        }


@lru_cache(maxsize=256)
def _sampled(mechanism: AtomicMechanism, rate: float, adjacency: Adjacency) -> AtomicPair:
    """The pair for removing or replacing a record; that for adding one is the reverse."""
    if rate == 1:
        return mechanism.pair(adjacency)
    within = mechanism.unsampled(adjacency)
    if within == adjacency:
        return mechanism.pair(adjacency).sampled(rate)
    return replaced_sampled(mechanism.pair(within), mechanism.pair(adjacency), rate)
