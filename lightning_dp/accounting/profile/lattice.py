"""Bounds of the privacy profile from a loss distribution on a lattice, for few hits, small noise and discrete losses.

Each step's loss is moved to multiples of a spacing. For upper bounds the mass of every cell is split between its two
ends so that both distributions keep their mass ("connect the dots", Doroshenko, Ghazi, Kamath, Kumar and Manurangsi,
2022): the result dominates the step. For lower bounds it is moved down to the lower end. Composition is a product of
Fourier transforms of the exponentially tilted masses, so that even tiny deltas keep their digits. The lattice starts at
the end of the loss's support, where nearly all of the mass of a rarely sampled record lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_dp.accounting.profile.cumulants import Ladder, Parts, ladder_for_delta, ladder_for_epsilon
from lightning_dp.accounting.profile.lattice_losses import (
    SNAP,
    TOLERANCE,
    LatticeLoss,
    as_parts,
    is_hopeless,
    on_lattice,
    points_from,
    reach_of,
)
from lightning_dp.accounting.profile.losses import AtomicLoss, Floats
from lightning_dp.accounting.profile.sampled_gaussian import Step

POINTS, FEW_POINTS = 2**18, 2**14
_NEAR = 5.0  # reach of a lower bound below the epsilon that the lattice is made for, in units of 1 / order
_ROUNDED = 4e-15  # of a loss, which is a sum of two
_MOVES = 2  # places of the lattice that are tried


def epsilon(parts: Parts, delta: float, points: int = POINTS, upper: bool = True, limit: float | None = None) -> float:
    """A bound of one direction's epsilon; ``inf``, or 0 for a lower bound, if the lattice does not reach it.

    Args:
        parts: Losses of one direction.
        delta: In (0, 1).
        points: Size of the lattice.
        upper: Which bound.
        limit: Losses of single steps beyond it are taken off the lattice, which may be all the finer, and counted
            exactly: where one step's loss is so large that the total exceeds epsilon whatever the others are, the
            event ``A`` that there is such a step adds ``P(A) - exp(epsilon) Q(A)`` to delta. Only for steps that
            remove a record; the result is no bound above :func:`farthest_epsilon`.
    """
    if not upper and is_hopeless(parts):
        return 0.0
    log_delta = math.log(delta)
    coarse = as_parts(on_lattice(parts, log_delta, None, upper, limit))
    ladder = ladder_for_delta(coarse, log_delta)
    order, mean = float(ladder.tilts[ladder.best]), float(ladder.means[ladder.best])
    center = max(0.0, mean - 1 / order - 1 / (order + 1))
    for _ in range(_MOVES):
        total = _total(parts, ladder, log_delta, center, points, upper, limit)
        value = total.epsilon(delta)
        start = float(total.losses[0])
        if start <= 0 or total.delta_at(0) > delta:
            break
        # Rare large losses drew the best order, and the lattice with it, far above epsilon.
        center = start / 2 if start > 1e-3 else 0.0
        ladder = ladder_for_epsilon(coarse, center)
    return value


def farthest_epsilon(parts: Parts, limit: float) -> float:
    """Up to which epsilon a limit may be used."""
    floors = [
        count * math.log1p(-part.loss.sampling_rate) if isinstance(part, Step) else -math.inf
        for part, count in zip(parts.parts, parts.counts, strict=True)
    ]
    return limit * (1 - 1e-9) + sum(floors)


def may_be_limited(parts: Parts) -> bool:
    """Whether all losses are those of sampled steps that remove a record, which have a least value."""
    return parts.rho == 0 and all(isinstance(part, Step) and part.loss.direction == "remove" for part in parts.parts)


def delta(parts: Parts, epsilon: float, points: int = POINTS, upper: bool = True, limit: float | None = None) -> float:
    """A bound of one direction's delta; see :func:`epsilon`."""
    if not upper and is_hopeless(parts):
        return 0.0
    rough = as_parts(on_lattice(parts, -40.0, None, upper, limit))
    log_delta = ladder_for_epsilon(rough, epsilon).renyi_log_delta(epsilon) - 5
    coarse = as_parts(on_lattice(parts, log_delta, None, upper, limit))
    ladder = ladder_for_epsilon(coarse, epsilon)
    value = _total(parts, ladder, log_delta, epsilon, points, upper, limit).delta(epsilon)
    return max(math.ulp(0.0), min(1.0, value)) if upper else max(0.0, value)


@dataclass(frozen=True)
class _Total:
    """Masses of a composition's loss above some point, in the unit ``exp(log_unit)``.

    Attributes:
        losses: Increasing points.
        masses: Masses at the points, with an allowance for rounding.
        log_unit: Logarithm of the unit of the masses.
        rest: What else has to be added to delta.
        far: Probabilities under ``P`` and ``Q`` of the event that adds ``P - exp(epsilon) Q``.
    """

    losses: Floats
    masses: Floats
    log_unit: float
    rest: float
    far: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def _payoff(self) -> Floats:
        return np.asarray(-np.expm1(self.losses[0] - self.losses), dtype=np.float64)

    def delta_at(self, index: int) -> float:
        """Delta at the point with this index."""
        total = float(self.masses[index:] @ self._payoff[: len(self.masses) - index])
        if self.log_unit > 700:
            return 0.0 if isinstance(self, _LowerTotal) else 1.0  # PRIVACY: what says nothing, for either bound
        far = self.far[0] - math.exp(min(float(self.losses[index]), 700.0)) * self.far[1]
        return total * math.exp(self.log_unit) + self.rest + far

    def delta(self, epsilon: float) -> float:
        """Delta at any epsilon; between the points it is linear in ``exp(epsilon)``."""
        index = int(np.searchsorted(self.losses, epsilon, side="right")) - 1
        if index < 0 or index > len(self.losses) - 2:
            return 1.0
        low, high = self.losses[index], self.losses[index + 1]
        share = math.expm1(epsilon - low) / math.expm1(high - low)
        return self.delta_at(index) * (1 - share) + self.delta_at(index + 1) * share

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at or above the first point whose delta is at most ``delta``; ``inf`` if there is none."""
        low, high = 0, len(self.losses) - 1
        if self.delta_at(high) > delta:
            return math.inf
        if self.delta_at(low) <= delta:
            return max(0.0, float(self.losses[0]))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.delta_at(middle) <= delta else (middle, high)
        at_low, at_high = self.delta_at(low), self.delta_at(high)
        width = float(self.losses[high] - self.losses[low])
        share = min(1.0, (at_low - delta) / (at_low - at_high) * (1 + 1e-9))
        return max(0.0, float(self.losses[low]) + math.log1p(share * math.expm1(width)) + self.rounded)

    @property
    def rounded(self) -> float:
        """By how much rounding may have moved losses down."""
        return _ROUNDED


@dataclass(frozen=True)
class _LowerTotal(_Total):
    """The same for losses that were moved down; ``slip`` is by how much rounding may have moved them up."""

    slip: float = 0.0

    @property
    def rounded(self) -> float:
        """By how much rounding may have moved losses up, with the sign of it."""
        return -_ROUNDED

    def delta(self, epsilon: float) -> float:
        """A lower bound of delta."""
        shifted = epsilon + self.slip
        if shifted < self.losses[0] or shifted >= self.losses[-1]:
            return 0.0
        return super().delta(shifted)

    def epsilon(self, delta: float) -> float:
        """A lower bound of epsilon; 0 if the lattice gives none."""
        if self.delta_at(0) <= delta or self.delta_at(len(self.losses) - 1) > delta:
            return 0.0
        return max(0.0, super().epsilon(delta) * (1 - 1e-9) - self.slip)


def _spacing(parts: Parts, wanted: float) -> float:
    """A spacing of at least ``wanted`` on which the first discrete loss of few values lies exactly, if there is one."""
    for part in parts.parts:
        if isinstance(part, AtomicLoss) and 1 < len(part.losses) <= 3:
            gap = float(np.diff(part.losses).min())
            return gap / math.floor(gap / wanted) if gap >= wanted else wanted
    return wanted


def _total(
    parts: Parts, ladder: Ladder, log_delta: float, epsilon: float, points: int, upper: bool, limit: float | None
) -> _Total:
    """Composes on a lattice that covers ``epsilon`` widely enough.

    Mass outside is wrapped into the range, where it only adds; what may be wrapped from above to below epsilon is
    bounded by Markov's inequality and added.
    """
    order = float(ladder.tilts[ladder.best])
    shift = _distance_of_aliases(ladder, epsilon, log_delta + TOLERANCE)
    extent = max(80 * math.sqrt(2 * parts.rho), *(reach_of(part, 40.0, limit) for part in parts.parts), 0.0)
    spacing = _spacing(parts, max(2 * shift, extent / (8 if limit is None else 2)) / points)
    lattice = on_lattice(parts, log_delta, spacing, upper, limit)
    start = sum(loss.count * loss.start for loss in lattice)
    indices = math.ceil((epsilon - shift - start) / spacing) + np.arange(points)
    losses = points_from(start + spacing * int(indices[0]), spacing, points)
    first = int(np.searchsorted(losses, max(-spacing, epsilon - (600 if upper else _NEAR) / order)))
    indices, losses = indices[first:], losses[first:]
    wrapped, log_scale, noise = _transformed(lattice, order, points)
    masses = np.maximum(wrapped, 0.0) + (noise if upper else -noise)
    masses = masses[indices % points] * np.exp(-order * (losses - epsilon))
    top = float(losses[-1])
    infinite = sum(loss.count * math.log1p(-loss.infinite) if loss.infinite < 1 else -math.inf for loss in lattice)
    far = _any_far(lattice, 0), _any_far(lattice, 1)
    tilts = order * np.array([0.0, 0.5, 0.8, 1.0, 1.25, 1.6, 2.5])
    cumulants = as_parts(lattice).cumulants(tilts)[0]
    if upper:
        log_above = float((cumulants - tilts * top)[3:].min())
        rest = math.exp(min(log_above, 0.0)) - math.expm1(infinite) * (1 + 1e-12)
        return _Total(losses, masses, log_scale - order * epsilon, rest, far)
    # Aliases grow towards smaller epsilon, so that the bound is taken at the lower end.
    log_aliases = cumulants - tilts * max(float(losses[0]), 0.0) - np.abs(tilts - order) * points * spacing
    aliases = 2 * math.exp(min(float(log_aliases[:3].min()), 0.0)) + 2 * math.exp(
        min(float(log_aliases[4:].min()), 0.0)
    )
    rest = -math.expm1(infinite) * (1 - 1e-12) - aliases - sum(loss.count * loss.raised for loss in lattice)
    slip = spacing * SNAP * sum(loss.count for loss in lattice)
    return _LowerTotal(losses, np.maximum(masses, 0.0), log_scale - order * epsilon, rest, far, slip)


def _any_far(lattice: tuple[LatticeLoss, ...], side: int) -> float:
    """Probability that any step's loss is beyond its limit."""
    return -math.expm1(sum(loss.count * math.log1p(-loss.far[side]) for loss in lattice))


def _distance_of_aliases(ladder: Ladder, epsilon: float, log_target: float) -> float:
    """Smallest shift of epsilon at which the aliases on both sides are below ``exp(log_target)``."""
    order, tilts = float(ladder.tilts[ladder.best]), np.append(0.0, ladder.tilts)
    exponents = np.append(0.0, ladder.values) - tilts * epsilon - log_target
    above, below = tilts > order * 1.1, tilts < order * 0.9
    return max(
        float((exponents[above] / (tilts[above] - order)).min(initial=math.inf)),
        float((exponents[below] / (order - tilts[below])).min()),
        1e-290,
    )


def _transformed(lattice: tuple[LatticeLoss, ...], order: float, points: int) -> tuple[Floats, float, float]:
    """Tilted masses of the sum, wrapped to the number of points, the logarithm of their total, and their error."""
    transform = np.ones(points // 2 + 1, dtype=np.complex128)
    log_scale = 0.0
    for loss in lattice:
        with np.errstate(divide="ignore"):
            exponent = np.log(loss.masses) + order * loss.atoms.losses
        top = float(exponent.max())
        weights = np.exp(exponent - top)
        total = float(weights.sum())
        folded = np.bincount(np.arange(len(weights)) % points, weights / total, points)
        transform *= np.fft.rfft(folded) ** loss.count
        log_scale += loss.count * (top + math.log(total))
    count = sum(loss.count for loss in lattice)
    noise = 1e-14 * (1 + count) * float(np.mean(np.abs(transform) ** (1 - 1 / max(2, count))))
    return np.fft.irfft(transform, points), log_scale, noise
