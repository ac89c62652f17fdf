"""The privacy loss of one step, in the forms that the accountant can compose.

A loss is the law of ``log(dP/dQ)`` under ``P``, for one ordered pair ``(P, Q)`` that dominates all pairs of neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]


@dataclass(frozen=True)
class GaussianLoss:
    """Loss of ``N(mu, 1)`` against ``N(0, 1)``.

    Args:
        mu: Distance of the means over the standard deviation; ``inf`` is a release without noise.
    """

    mu: float


@dataclass(frozen=True)
class SampledGaussianLoss:
    """Loss of one Poisson-sampled Gaussian step.

    With noise of standard deviation ``sigma`` and ``G(m) = (1 - q) N(0, sigma^2) + q N(m, sigma^2)``, the pairs are
    ``G(1)`` against ``N(0, sigma^2)`` (remove), its reverse (add), and ``G(1)`` against ``G(-1)`` (replace).

    Args:
        sampling_rate: Probability ``q`` of each record, in (0, 1).
        sigma: Noise over the bound of one record, greater than 0.
        direction: The pair.
    """

    sampling_rate: float
    sigma: float
    direction: Literal["remove", "add", "replace"]

    @property
    def largest(self) -> float:
        """Largest possible loss, rounded up."""
        return -math.log1p(-self.sampling_rate) * (1 + 1e-15) if self.direction == "add" else math.inf

    @property
    def distance(self) -> float:
        """Total variation distance of the pair, from above: with the record outside the sample there is none."""
        shift = (2 if self.direction == "replace" else 1) / self.sigma
        return self.sampling_rate * math.erf(shift / math.sqrt(8))


@dataclass(frozen=True, eq=False)
class AtomicLoss:
    """A loss with finitely many values. Equal only to itself, so build each one once.

    Attributes:
        losses: The finite values, increasing, ``(atoms,)``.
        masses: Their probabilities under ``P``, ``(atoms,)``.
        infinite: Probability under ``P`` of an infinite loss; all probabilities add up to 1.
    """

    losses: Floats
    masses: Floats
    infinite: float = 0.0

    @property
    def largest(self) -> float:
        """Largest possible loss."""
        return math.inf if self.infinite > 0 else float(self.losses[-1])

    @property
    def distance(self) -> float:
        """Total variation distance of the pair."""
        return float(self.masses @ -np.expm1(-np.maximum(self.losses, 0.0))) + self.infinite


Loss = GaussianLoss | SampledGaussianLoss | AtomicLoss
