"""A sampled Gaussian step, as a group of records sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency, Direction
from lightning_dp.accounting.mechanisms.base import SingleMechanism
from lightning_dp.accounting.profile.atoms import AtomicPair, spread_cells
from lightning_dp.accounting.profile.closed_form import normal_cells
from lightning_dp.accounting.profile.losses import GaussianLoss, Loss, SampledGaussianLoss

_REACH = 13.5  # a standard normal variable is beyond with probability 1e-41
_STEP = 0.01  # distance of outputs, in units of the noise
_MOST_VALUES = 10_000_000  # outputs times records
_LEAST_LOSS = -600.0  # a smaller one leaves the range of floats


@dataclass(frozen=True)
class SampledGroup(SingleMechanism):
    """One Poisson-sampled Gaussian step, for ``size`` records that come and go together and are sampled one by one.

    How many of them are in the sample is binomial, and at worst they add up in one direction: the pair is a binomial
    mixture of ``N(k, sigma^2)`` against ``N(0, sigma^2)`` (Ganesh, 2024, mixture of Gaussians mechanism). Replacing the
    group is bounded by removing one and adding another.

    Args:
        noise_multiplier: Standard deviation of the noise over the bound of one record's contribution, greater than 0.
        sampling_rate: Probability of each record to be in the sample, in (0, 1).
        size: Number of records, at least 2.
    """

    noise_multiplier: float
    sampling_rate: float
    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _validate.positive("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "sampling_rate", _validate.probability("sampling_rate", self.sampling_rate))
        object.__setattr__(self, "size", _validate.integer("size", self.size, 2))

    def loss(self, adjacency: Adjacency, direction: Direction) -> Loss:
        """See :meth:`SingleMechanism.loss`."""
        outputs = (2 * _REACH + self.size / self.noise_multiplier) / _STEP
        floor = self.size * math.log1p(-self.sampling_rate) if self.sampling_rate < 1 else -math.inf
        if outputs * (self.size + 1) > _MOST_VALUES or floor < _LEAST_LOSS:
            return self._as_one_record(direction)
        pair = _pair(self.noise_multiplier, self.sampling_rate, self.size)
        if direction == "replace":
            return _replaced(self.noise_multiplier, self.sampling_rate, self.size).loss
        return pair.reverse.loss if direction == "add" else pair.loss

    def _as_one_record(self, direction: Direction) -> Loss:
        """An upper bound: the group is sampled when any of its records is, and then counts in full."""
        rate = -math.expm1(self.size * math.log1p(-self.sampling_rate)) if self.sampling_rate < 1 else 1.0
        sigma = self.noise_multiplier / self.size
        if rate == 1:
            return GaussianLoss((2 if direction == "replace" else 1) / sigma)
        return SampledGaussianLoss(rate, sigma, direction)

    def group(self, size: int) -> SampledGroup:
        """More records of the same kind."""
        return SampledGroup(self.noise_multiplier, self.sampling_rate, self.size * _validate.integer("size", size, 1))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {
            "kind": "sampled_group",
            "noise_multiplier": self.noise_multiplier,
            "sampling_rate": self.sampling_rate,
            "size": self.size,
        }


@lru_cache(maxsize=64)
def _pair(sigma: float, rate: float, size: int) -> AtomicPair:
    """The group in the data against the group not in the data."""
    counts = np.arange(size + 1)
    log_weights = binom.logpmf(counts, size, rate)
    weights = np.exp(log_weights)
    x = np.arange(-_REACH, size / sigma + _REACH + _STEP, _STEP)
    exponents = log_weights + np.multiply.outer(x, counts / sigma) - (counts / sigma) ** 2 / 2
    losses = np.append(log_weights[0], np.logaddexp.reduce(exponents, axis=1))
    edges = np.append(-np.inf, x)
    p = sum(weight * normal_cells(edges - k / sigma) for weight, k in zip(weights, counts, strict=True))
    beyond = float(weights @ ndtr(counts / sigma - x[-1]))
    return spread_cells(losses, np.asarray(p, dtype=np.float64), normal_cells(edges), beyond)


@lru_cache(maxsize=64)
def _replaced(sigma: float, rate: float, size: int) -> AtomicPair:
    pair = _pair(sigma, rate, size)
    return pair.chained(pair.reverse)
