"""One direction of a composition: losses with their counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_dp.accounting.profile.cumulants import Part, Parts
from lightning_dp.accounting.profile.losses import AtomicLoss, GaussianLoss, Loss, SampledGaussianLoss
from lightning_dp.accounting.profile.sampled_gaussian import Step

_MOST_SIGMA = 1e6  # more noise than that is not counted
_LEAST_RATE, _MOST_RATE = 1e-12, 1 - 1e-9  # below, this rate is assumed; above, no sampling is assumed


@dataclass(frozen=True)
class Composed:
    """A composition of independent losses.

    Attributes:
        sampled: Sampled Gaussian steps with their counts.
        atomic: Discrete losses with their counts.
        mu: Distance over noise of the one Gaussian to which all plain Gaussian steps compose.
        is_clamped: Whether a step was replaced by a less private one, so that nothing is a lower bound.
    """

    sampled: tuple[tuple[SampledGaussianLoss, int], ...] = ()
    atomic: tuple[tuple[AtomicLoss, int], ...] = ()
    mu: float = 0.0
    is_clamped: bool = False

    @staticmethod
    def of(losses: Iterable[tuple[Loss, int]]) -> Composed:
        """Sorts losses by their kind; rates and noise of absurd size are replaced by less private ones."""
        sampled, atomic, mus, clamped = [], [], [], False
        for loss, count in losses:
            if isinstance(loss, AtomicLoss):
                atomic.append((loss, count))
            elif isinstance(loss, GaussianLoss):
                mus.append(loss.mu * math.sqrt(count))
            elif loss.sampling_rate > _MOST_RATE:
                mus.append((2 if loss.direction == "replace" else 1) / loss.sigma * math.sqrt(count))
                clamped = True
            else:
                rate, sigma = max(loss.sampling_rate, _LEAST_RATE), min(loss.sigma, _MOST_SIGMA)
                clamped |= (rate, sigma) != (loss.sampling_rate, loss.sigma)
                sampled.append((replace(loss, sampling_rate=rate, sigma=sigma), count))
        return Composed(tuple(sampled), tuple(atomic), math.hypot(*mus), clamped)

    def __add__(self, other: Composed) -> Composed:
        losses: list[tuple[Loss, int]] = [*self.sampled, *self.atomic, *other.sampled, *other.atomic]
        counts: dict[Loss, int] = {}
        for loss, count in losses:
            counts[loss] = counts.get(loss, 0) + count
        together = Composed.of(counts.items())
        clamped = self.is_clamped or other.is_clamped
        return replace(together, mu=math.hypot(self.mu, other.mu), is_clamped=clamped)

    @property
    def is_plain(self) -> bool:
        """Whether one Gaussian stands for everything."""
        return not self.sampled and not self.atomic

    @property
    def is_one_step(self) -> bool:
        """Whether it is a single sampled step."""
        return self.mu == 0 and not self.atomic and len(self.sampled) == 1 and self.sampled[0][1] == 1

    @property
    def is_one_atomic(self) -> bool:
        """Whether it is a single discrete loss."""
        return self.mu == 0 and not self.sampled and len(self.atomic) == 1 and self.atomic[0][1] == 1

    @property
    def largest(self) -> float:
        """Largest possible loss."""
        sampled = sum(n * loss.largest for loss, n in self.sampled)
        return math.inf if self.mu else sampled + sum(n * loss.largest for loss, n in self.atomic)

    @property
    def distance(self) -> float:
        """Upper bound of the total variation distance, hence of delta at every epsilon."""
        total = math.erf(self.mu / math.sqrt(8)) + sum(n * loss.distance for loss, n in self.sampled)
        return min(1.0, (total + sum(n * loss.distance for loss, n in self.atomic)) * (1 + 1e-14))

    def parts(self) -> Parts:
        """What the integrals are over."""
        parts: list[Part] = [Step(loss) for loss, _ in self.sampled]
        parts += [loss for loss, _ in self.atomic]
        counts = [n for _, n in self.sampled] + [n for _, n in self.atomic]
        return Parts(tuple(parts), tuple(counts), self.mu**2 / 2)
