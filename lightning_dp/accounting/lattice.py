"""Upper bounds of the privacy profile from a loss distribution on a lattice, for few hits and small noise.

Each step's loss is moved to multiples of a spacing by splitting the mass of every cell between its two ends so that
both distributions keep their mass ("connect the dots", Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, 2022): the
result dominates the step. Composition is a product of Fourier transforms of the exponentially tilted masses, so that
even tiny deltas keep their digits. The lattice starts at the end of the loss's support, where nearly all of the mass
of a rarely sampled record lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import ndtr, ndtri_exp

from lightning_dp.accounting.contour import (
    Composed,
    chernoff_log_delta,
    order_for_delta,
    order_for_epsilon,
    period,
)
from lightning_dp.accounting.loss import Floats, SampledGaussianLoss

POINTS, FEW_POINTS = 2**18, 2**14
_COARSE = 2**12
_TOLERANCE = math.log(1e-13)


def _lattice(start: float, spacing: float, points: int) -> Floats:
    return np.asarray(start + spacing * np.arange(points), dtype=np.float64)


@dataclass(frozen=True)
class LatticeStep:
    """Masses of one step's loss at ``start + spacing * (0, 1, ...)``, and at infinity."""

    masses: Floats
    start: float
    spacing: float
    infinite: float
    count: int

    @property
    def losses(self) -> Floats:
        """Where the masses lie."""
        return _lattice(self.start, self.spacing, len(self.masses))

    def tilted(self, c: float) -> tuple[float, Floats]:
        """``log sum(masses * exp(c * losses))`` and the normalised masses under the tilt."""
        with np.errstate(divide="ignore"):
            exponent = np.log(self.masses) + c * self.losses
        top = float(exponent.max())
        weights = np.exp(exponent - top)
        total = float(weights.sum())
        return top + math.log(total), weights / total


@dataclass(frozen=True)
class LatticeComposed:
    """A composition of lattice steps."""

    steps: tuple[LatticeStep, ...]

    def cumulants(self, c: float) -> tuple[float, float, float]:
        """``K(c)`` of the finite part and its first two derivatives."""
        value = first = second = 0.0
        for step in self.steps:
            cumulant, weights = step.tilted(c)
            mean = float(weights @ step.losses)
            value += step.count * cumulant
            first += step.count * mean
            second += step.count * float(weights @ (step.losses - mean) ** 2)
        return value, first, second


def _cells(boundaries: Floats) -> Floats:
    """Standard normal probability between neighbouring boundaries, in relative precision on both sides."""
    low, high = boundaries[:-1], boundaries[1:]
    return np.asarray(np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)), dtype=np.float64)


def _split(p: Floats, q: Floats, losses: Floats, spacing: float) -> Floats:
    """Masses at the ends of the cells; ``p`` and ``q`` are the probabilities of the cells, ``losses`` all ends."""
    upward = (p - np.exp(np.minimum(losses[:-1], 700.0)) * q) / -math.expm1(-spacing)
    upward = np.clip(upward + 1e-15 * p / -math.expm1(-spacing), 0.0, p)
    masses = np.zeros(len(losses))
    masses[1:] += upward
    masses[:-1] += p - upward
    return masses


def _step(loss: SampledGaussianLoss, count: int, cells: int, spacing: float) -> LatticeStep:
    """One sampled step on ``cells`` cells."""
    q, sigma = loss.sampling_rate, loss.sigma
    grid = spacing * np.arange(1, cells + 1)
    large = grid + np.log(-np.expm1(-grid))
    argument = math.log1p(-q) - math.log(q) + large
    x = np.append(-np.inf, sigma * argument + 1 / (2 * sigma))
    base, shifted = _cells(x), _cells(x - 1 / sigma)
    mixed = (1 - q) * base + q * shifted
    beyond = float(ndtr(-x[-1])), float(ndtr(1 / sigma - x[-1]))
    floor = math.log1p(-q)
    if loss.removing:
        losses = _lattice(floor, spacing, cells + 1)
        infinite = (1 - q) * beyond[0] + q * beyond[1]
        return LatticeStep(_split(mixed, base, losses, spacing), floor, spacing, infinite, count)
    start = -floor - spacing * cells
    losses = _lattice(start, spacing, cells + 1)
    masses = _split(base[::-1], mixed[::-1], losses, spacing)
    masses[0] += beyond[0]
    return LatticeStep(masses, start, spacing, 0.0, count)


def _gaussian_step(mu: float, extent: float, spacing: float) -> LatticeStep:
    """All steps without sampling, as the one Gaussian they compose to."""
    low = math.floor((-extent * mu + mu**2 / 2) / spacing)
    losses = _lattice(low * spacing, spacing, math.ceil((extent * mu + mu**2 / 2) / spacing) + 1 - low)
    x = losses / mu + mu / 2
    masses = _split(_cells(x - mu), _cells(x), losses, spacing)
    masses[0] += float(ndtr(x[0] - mu))
    return LatticeStep(masses, float(losses[0]), spacing, float(ndtr(mu - x[-1])), 1)


def build(composed: Composed, log_delta: float, spacing: float | None) -> LatticeComposed:
    """Every step on a lattice; masses above the range go to infinity and add less than 1e-13 of delta.

    Args:
        composed: Steps of one direction.
        log_delta: Order of magnitude of the deltas that matter.
        spacing: Distance of the lattice, or None for a coarse one per step, good for cumulants only.
    """
    total = sum(count for _, count in composed.steps) + 1
    extent = -float(ndtri_exp(log_delta + _TOLERANCE - math.log(total)))
    steps = []
    for loss, count in composed.steps:
        reach = _reach(loss, extent)
        width = spacing or reach / _COARSE
        steps.append(_step(loss, count, math.ceil(reach / width) + 1, width))
    if composed.rho > 0:
        mu = math.sqrt(2 * composed.rho)
        steps.append(_gaussian_step(mu, extent, spacing or 2 * (extent * mu + mu**2 / 2) / _COARSE))
    return LatticeComposed(tuple(steps))


def _reach(loss: SampledGaussianLoss, extent: float) -> float:
    """Length of the loss's range up to ``extent`` standard deviations of the noise."""
    shift = 1 / loss.sigma if loss.removing else 0.0
    argument = (shift + extent) / loss.sigma - 1 / (2 * loss.sigma**2)
    q = loss.sampling_rate
    return float(np.logaddexp(0.0, math.log(q) - math.log1p(-q) + argument))


@dataclass(frozen=True)
class _Total:
    """Masses of a composition's loss above some point, in the unit ``exp(log_unit)``.

    Attributes:
        losses: Increasing points.
        masses: Masses at the points, with an allowance for rounding.
        log_unit: Logarithm of the unit of the masses.
        rest: Bound of everything else that adds to delta.
    """

    losses: Floats
    masses: Floats
    log_unit: float
    rest: float

    @cached_property
    def _payoff(self) -> Floats:
        return np.asarray(-np.expm1(self.losses[0] - self.losses), dtype=np.float64)

    def delta_at(self, index: int) -> float:
        """Delta at the point with this index."""
        total = float(self.masses[index:] @ self._payoff[: len(self.masses) - index])
        if self.log_unit > 700:
            return 1.0
        return total * math.exp(self.log_unit) + self.rest

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
        return max(0.0, float(self.losses[low]) + math.log1p(share * math.expm1(width)))


def _total(composed: Composed, log_delta: float, epsilon: float, order: float, shift: float, points: int) -> _Total:
    """Composes on a lattice that covers ``epsilon`` plus or minus ``shift``.

    Mass outside is wrapped into the range, where it only adds; what may be wrapped from above to below epsilon is
    bounded by Markov's inequality and added.
    """
    extent = max(80 * math.sqrt(2 * composed.rho), *(_reach(loss, 40.0) for loss, _ in composed.steps))
    spacing = max(2 * shift, extent / 8) / points
    lattice = build(composed, log_delta, spacing)
    start = sum(step.count * step.start for step in lattice.steps)
    indices = math.ceil((epsilon - shift - start) / spacing) + np.arange(points)
    losses = _lattice(start + spacing * int(indices[0]), spacing, points)
    first = int(np.searchsorted(losses, max(-spacing, epsilon - 600 / order)))
    indices, losses = indices[first:], losses[first:]
    wrapped, log_scale = _transformed(lattice, order, points)
    masses = wrapped[indices % points] * np.exp(-order * (losses - epsilon))
    top = float(losses[-1])
    log_above = min(lattice.cumulants(order * f)[0] - order * f * top for f in (1.0, 1.2, 1.5, 2.0))
    rest = math.exp(min(log_above, 0.0)) + sum(step.count * step.infinite for step in lattice.steps)
    return _Total(losses, masses, log_scale - order * epsilon, rest)


def _transformed(lattice: LatticeComposed, order: float, points: int) -> tuple[Floats, float]:
    """Tilted masses of the sum, wrapped to the number of points, and the logarithm of their total."""
    transform = np.ones(points // 2 + 1, dtype=np.complex128)
    log_scale = 0.0
    for step in lattice.steps:
        cumulant, weights = step.tilted(order)
        folded = np.bincount(np.arange(len(weights)) % points, weights, points)
        transform *= np.fft.rfft(folded) ** step.count
        log_scale += step.count * cumulant
    count = sum(step.count for step in lattice.steps)
    noise = 1e-14 * (1 + count) * float(np.mean(np.abs(transform) ** (1 - 1 / max(2, count))))
    return np.maximum(np.fft.irfft(transform, points), 0.0) + noise, log_scale


def epsilon(composed: Composed, delta: float, points: int = POINTS) -> float:
    """Upper bound of one direction's epsilon, ``inf`` if the lattice does not reach it."""
    log_delta = math.log(delta)
    coarse = build(composed, log_delta, None).cumulants
    order = order_for_delta(coarse, log_delta)
    center = max(0.0, coarse(order)[1] - 1 / order - 1 / (order + 1))
    shift = period(coarse, order, center, log_delta + _TOLERANCE)
    return _total(composed, log_delta, center, order, shift, points).epsilon(delta)


def delta(composed: Composed, epsilon: float, points: int = POINTS) -> float:
    """Upper bound of one direction's delta."""
    rough = build(composed, -40.0, None).cumulants
    log_delta = chernoff_log_delta(rough, order_for_epsilon(rough, epsilon), epsilon) - 5
    coarse = build(composed, log_delta, None).cumulants
    order = order_for_epsilon(coarse, epsilon)
    shift = period(coarse, order, epsilon, log_delta + _TOLERANCE)
    return max(math.ulp(0.0), min(1.0, _total(composed, log_delta, epsilon, order, shift, points).delta(epsilon)))
