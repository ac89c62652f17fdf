"""Losses moved onto a lattice: upwards so that they dominate, or downwards so that they are dominated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import ndtr, ndtri_exp

from lightning_dp.accounting.profile.closed_form import normal_cells, replacing_output
from lightning_dp.accounting.profile.cumulants import Part, Parts
from lightning_dp.accounting.profile.losses import AtomicLoss, Floats, SampledGaussianLoss

TOLERANCE = math.log(1e-13)  # share of delta that may lie beyond the lattice
SNAP = 1e-9  # a loss this close to a point of the lattice, in units of the spacing, lies on it
_COARSE, _MOST_CELLS = 2**12, 2**21
_MOST_LOWERED = 10_000


@dataclass(frozen=True)
class LatticeLoss:
    """Masses of one loss at ``start + spacing * (0, 1, ...)``, and at infinity."""

    masses: Floats
    start: float
    spacing: float
    infinite: float
    count: int
    raised: float = 0.0  # probability that a lower bound had to move up
    far: tuple[float, float] = (0.0, 0.0)  # probabilities, under P and under Q, of losses beyond the limit

    @cached_property
    def atoms(self) -> AtomicLoss:
        """The same as a discrete loss."""
        return AtomicLoss(points_from(self.start, self.spacing, len(self.masses)), self.masses, self.infinite)


def points_from(start: float, spacing: float, points: int) -> Floats:
    """So many points of a lattice, ``(points,)``."""
    return np.asarray(start + spacing * np.arange(points), dtype=np.float64)


def as_parts(losses: tuple[LatticeLoss, ...]) -> Parts:
    """The losses as parts of a composition, for their cumulants."""
    return Parts(tuple(loss.atoms for loss in losses), tuple(loss.count for loss in losses), 0.0)


def on_lattice(
    parts: Parts, log_delta: float, spacing: float | None, upper: bool, limit: float | None
) -> tuple[LatticeLoss, ...]:
    """Every loss on a lattice; masses above the range go to infinity and add less than 1e-13 of delta.

    Args:
        parts: Losses of one direction.
        log_delta: Order of magnitude of the deltas that matter.
        spacing: Distance of the lattice, or None for a coarse one per loss, good for cumulants only.
        upper: Whether to dominate the losses, or to be dominated by them.
        limit: Losses beyond it are left out.
    """
    extent = -float(ndtri_exp(log_delta + TOLERANCE - math.log(sum(parts.counts) + 1)))
    losses = []
    if (
        spacing is not None
        and max((reach_of(part, extent, limit) for part in parts.parts), default=0.0) > _MOST_CELLS * spacing
    ):
        raise ArithmeticError("The lattice would be too large.")
    for part, count in zip(parts.parts, parts.counts, strict=True):
        reach = reach_of(part, extent, limit)
        losses.append(_moved(part, count, reach, spacing or reach / _COARSE, upper, limit))
    if parts.rho > 0:
        mu = math.sqrt(2 * parts.rho)
        reach = extent * mu + mu**2 / 2
        losses.append(_gaussian(mu, reach, spacing or 2 * reach / _COARSE, upper))
    return tuple(losses)


def is_hopeless(parts: Parts) -> bool:
    """Whether moving losses down would leave nothing of them: many steps whose bulk lies between two points."""
    return any(
        count > _MOST_LOWERED
        for part, count in zip(parts.parts, parts.counts, strict=True)
        if not isinstance(part, AtomicLoss) and part.loss.direction == "replace"
    )


def reach_of(part: Part, extent: float, limit: float | None) -> float:
    """Length of the range of a loss that matters, up to ``extent`` standard deviations of the noise, or to a limit."""
    if isinstance(part, AtomicLoss):
        return max(float(part.losses[-1] - part.losses[0]), 1e-12)
    loss = part.loss
    argument = ((0.0 if loss.direction == "add" else 1 / loss.sigma) + extent) / loss.sigma - 1 / (2 * loss.sigma**2)
    q = loss.sampling_rate
    reach = float(np.logaddexp(0.0, math.log(q) - math.log1p(-q) + argument))
    return reach if limit is None else min(reach, limit - math.log1p(-q))


def _moved(part: Part, count: int, reach: float, spacing: float, upper: bool, limit: float | None) -> LatticeLoss:
    if isinstance(part, AtomicLoss):
        return _moved_atoms(part, count, spacing, upper)
    moved = _moved_step(part.loss, count, math.ceil(reach / spacing) + 1, spacing, upper)
    if limit is None:
        return moved
    last = float(moved.start + moved.spacing * (len(moved.masses) - 1))
    if last < limit * (1 - 1e-9):  # PRIVACY: a loss beyond need not exceed epsilon, so it counts as infinite
        return moved
    far = _beyond(part.loss, last)
    masses = moved.masses if upper else np.append(moved.masses[:-1], max(0.0, moved.masses[-1] - far[0]))
    return replace(moved, masses=masses, infinite=0.0, far=far)


def _beyond(loss: SampledGaussianLoss, value: float) -> tuple[float, float]:
    """Probabilities under ``P`` and under ``Q`` that removing a record has more than this loss."""
    q, sigma = loss.sampling_rate, loss.sigma
    excess = value - math.log1p(-q)
    x = sigma * (math.log1p(-q) - math.log(q) + excess + math.log(-math.expm1(-excess))) + 1 / (2 * sigma)
    return float((1 - q) * ndtr(-x) + q * ndtr(1 / sigma - x)), float(ndtr(-x))


def _moved_atoms(loss: AtomicLoss, count: int, spacing: float, upper: bool) -> LatticeLoss:
    start = float(loss.losses[0])
    place = (loss.losses - start) / spacing
    nearest = np.rint(place)
    if not upper:  # :class:`lattice._LowerTotal` takes what this may raise into account
        place = np.where(np.abs(place - nearest) < SNAP, nearest, place)
    below = np.floor(place).astype(np.intp)
    length = int(below[-1]) + 2
    share = np.expm1(spacing * (below - place)) / math.expm1(-spacing) if upper else np.zeros_like(place)
    masses = np.zeros(length)
    masses += np.bincount(below, loss.masses * (1 - share), length)
    masses += np.bincount(below + 1, loss.masses * share, length)
    return LatticeLoss(masses, start, spacing, loss.infinite, count)


def _moved_step(loss: SampledGaussianLoss, count: int, cells: int, spacing: float, upper: bool) -> LatticeLoss:
    """One sampled step on ``cells`` cells, or twice as many if losses have no end on either side."""
    q, shift = loss.sampling_rate, 1 / loss.sigma
    floor = math.log1p(-q)

    def sampled(x: Floats, at: float) -> Floats:
        return (1 - q) * normal_cells(x) + q * normal_cells(x - at)

    def beyond(x: float, at: float) -> float:
        return float((1 - q) * ndtr(-x) + q * ndtr(at - x))

    if loss.direction == "replace":
        losses = points_from(-spacing * cells, spacing, 2 * cells + 1)
        x = replacing_output(loss, losses)
        p, base = sampled(x, shift), sampled(x, -shift)
        ends = beyond(-float(x[0]), -shift), beyond(float(x[-1]), shift)
        return _settled(p, base, losses, spacing, ends, count, upper)
    grid = spacing * np.arange(1, cells + 1)
    argument = math.log1p(-q) - math.log(q) + grid + np.log(-np.expm1(-grid))
    x = np.append(-np.inf, loss.sigma * argument + shift / 2)
    if loss.direction == "remove":
        losses = points_from(floor, spacing, cells + 1)
        return _settled(
            sampled(x, shift), normal_cells(x), losses, spacing, (0.0, beyond(float(x[-1]), shift)), count, upper
        )
    losses = points_from(-floor - spacing * cells, spacing, cells + 1)
    ends = float(ndtr(-x[-1])), 0.0
    return _settled(normal_cells(x)[::-1], sampled(x, shift)[::-1], losses, spacing, ends, count, upper)


def _gaussian(mu: float, reach: float, spacing: float, upper: bool) -> LatticeLoss:
    """All steps without sampling, as the one Gaussian they compose to."""
    low = math.floor((mu**2 - reach) / spacing)
    losses = points_from(low * spacing, spacing, math.ceil(reach / spacing) + 1 - low)
    x = losses / mu + mu / 2
    ends = float(ndtr(x[0] - mu)), float(ndtr(mu - x[-1]))
    return _settled(normal_cells(x - mu), normal_cells(x), losses, spacing, ends, 1, upper)


def _settled(
    p: Floats, q: Floats, losses: Floats, spacing: float, ends: tuple[float, float], count: int, upper: bool
) -> LatticeLoss:
    """Masses at the ends of the cells.

    Args:
        p: Probabilities of the cells under ``P``, ``(cells,)``.
        q: Probabilities of the cells under ``Q``, ``(cells,)``.
        losses: All ends, ``(cells + 1,)``.
        spacing: Their distance.
        ends: Probabilities under ``P`` below and above all cells.
        count: How often the loss occurs.
        upper: Which bound is wanted.
    """
    masses = np.zeros(len(losses))
    if not upper:
        masses[:-1] = p
        masses[0] += ends[0]
        masses[-1] = ends[1]
        return LatticeLoss(masses, float(losses[0]), spacing, 0.0, count, ends[0])
    upward = (p - np.exp(np.minimum(losses[:-1], 700.0)) * q) / -math.expm1(-spacing)
    upward = np.clip(upward + 1e-15 * p / -math.expm1(-spacing), 0.0, p)
    masses[1:] += upward
    masses[:-1] += p - upward
    masses[0] += ends[0]
    return LatticeLoss(masses, float(losses[0]), spacing, ends[1], count)
