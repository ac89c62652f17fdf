"""Discrete dominating pairs: how they are built, sampled and read.

A pair ``(P, Q)`` is kept with both masses of each loss, so that its reverse and its sampled forms follow without
rounding beyond that of one multiplication, down to masses that one of the two sides can no longer represent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting.profile.closed_form import smallest
from lightning_dp.accounting.profile.losses import AtomicLoss, Floats, GaussianLoss, Loss

Indices = NDArray[np.intp]

_ROUNDING = 1e-14
_HULL_ROUNDING = 1e-12  # interpolated values are raised by this share, far above what their differences lose
_BLOCK = 512


@dataclass(frozen=True, eq=False)
class AtomicPair:
    """Two discrete distributions, as the values of ``log(P / Q)`` with their masses.

    Attributes:
        losses: The finite values, increasing, ``(atoms,)``.
        p: Their probabilities under ``P``, ``(atoms,)``.
        q: Their probabilities under ``Q``, ``p * exp(-losses)``, ``(atoms,)``.
        p_only: Probability under ``P`` of what is impossible under ``Q``.
        q_only: Probability under ``Q`` of what is impossible under ``P``.
    """

    losses: Floats
    p: Floats
    q: Floats
    p_only: float = 0.0
    q_only: float = 0.0

    @cached_property
    def loss(self) -> Loss:
        """The loss of ``P`` against ``Q``; one object however often it is asked for."""
        kept = self.p > 0
        if self.p_only >= 1 or not kept.any():
            return GaussianLoss(math.inf)
        masses = self.p[kept]
        missing = 1 - math.fsum((*masses, self.p_only))
        masses[np.argmax(masses)] += max(0.0, missing)  # PRIVACY: rounding never loses mass
        return AtomicLoss(self.losses[kept], masses, self.p_only)

    @cached_property
    def reverse(self) -> AtomicPair:
        """The pair ``(Q, P)``."""
        return AtomicPair(-self.losses[::-1], self.q[::-1], self.p[::-1], self.q_only, self.p_only)

    def sampled(self, rate: float) -> AtomicPair:
        """The pair ``((1 - rate) Q + rate P, Q)``, exactly (Li, Qardaji and Su, 2012).

        ``P`` and ``Q`` are a mechanism with and without one record, which joins a sample with probability ``rate``.
        """
        if rate == 1:
            return self
        losses = np.append(math.log1p(-rate), amplified(rate, self.losses))
        without = np.append(self.q_only, self.q)
        present = np.append(0.0, self.p)
        return _merged(losses, (1 - rate) * without + rate * present, without, rate * self.p_only, 0.0)

    def chained(self, other: AtomicPair) -> AtomicPair:
        """The worst pair ``(P, Q)`` that this pair, ``(P, R)``, and the other, ``(R, Q)``, allow.

        For any event and any split of ``epsilon = a + b``, ``P - exp(epsilon) Q`` is ``P - exp(a) R`` plus ``exp(a)``
        times ``R - exp(b) Q``, so delta at epsilon is at most ``delta_PR(a) + exp(a) * delta_RQ(b)``. The best split
        has equal probabilities under ``R`` of losses above ``a`` and above ``b``. The pair in which the events of ``R``
        are ordered alike by both losses attains it: its profile is the least bound that the two profiles give.
        """
        first, second = self.losses, other.losses
        p, r1, q, r2 = self.p, self.q, other.q, other.p
        if self.q_only > 0:
            first, p, r1 = np.append(-math.inf, first), np.append(0.0, p), np.append(self.q_only, r1)
        if other.p_only > 0:
            second, q, r2 = np.append(second, math.inf), np.append(q, 0.0), np.append(r2, other.p_only)
        i, j, p, q = _ordered_alike(p, r1, q, r2)
        of_p, of_q = np.isfinite(second[j]), np.isfinite(first[i])
        finite = of_p & of_q
        losses = first[i[finite]] + second[j[finite]]
        p_only, q_only = self.p_only + float(p[~of_p].sum()), other.q_only + float(q[~of_q].sum())
        return _merged(losses, p[finite], q[finite], p_only, q_only)

    def delta(self, epsilon: Floats) -> Floats:
        """The privacy profile, at any epsilon, also below 0."""
        return _hockey_sticks(self.losses, self.p, self.p_only, epsilon)


def atomic_delta(loss: AtomicLoss, epsilon: Floats) -> Floats:
    """Privacy profile of one discrete loss, ``E[(1 - exp(epsilon - L))_+]``, rounded up.

    Args:
        loss: The loss of the pair.
        epsilon: Any finite numbers, also below 0.

    Returns:
        Delta, in [0, 1], of the shape of ``epsilon``.
    """
    return _hockey_sticks(loss.losses, loss.masses, loss.infinite, epsilon)


def atomic_epsilon(loss: AtomicLoss, delta: float) -> float:
    """Smallest ``epsilon >= 0`` at which :func:`atomic_delta` is at most ``delta``; ``inf`` if none is.

    Args:
        loss: The loss of the pair.
        delta: In (0, 1).
    """
    if loss.infinite > delta:
        return math.inf
    if float(atomic_delta(loss, np.zeros(1))[0]) <= delta:
        return 0.0
    return smallest(lambda epsilon: float(atomic_delta(loss, np.array([epsilon]))[0]), delta, float(loss.losses[-1]))


def randomized(epsilon: float, others: float = 1.0, reveals: float = 0.0) -> AtomicPair:
    """Two answers of randomized response over ``others + 1`` categories.

    Args:
        epsilon: Largest finite loss, at least 0.
        others: Number of wrong answers.
        reveals: Probability that the answer is given away instead (Kairouz, Oh and Viswanath, 2015).
    """
    ratio = math.exp(-epsilon)
    truth = (1 - reveals) / (1 + others * ratio)
    wrong = truth * ratio
    masses = np.array([wrong, (others - 1) * wrong, truth])
    losses = np.array([-epsilon, 0.0, epsilon])
    kept = np.array([True, others > 1, True])
    return _merged(losses[kept], masses[kept], masses[::-1][kept], reveals, reveals)


def exponential_density(epsilon: float, height: float, edge: float) -> AtomicPair:
    """A loss in ``[-epsilon, epsilon]`` with density ``height * exp((l - epsilon) / 2)`` under ``P``, made discrete.

    Between neighbouring points ``a < b`` all mass moves to ``a`` and ``b`` so that both sides keep theirs, which
    interpolates the profile linearly in ``exp(epsilon)`` and hence dominates (Doroshenko, Ghazi, Kamath, Kumar and
    Manurangsi, 2022). For this density ``a`` gets ``2 * height * exp((a - epsilon) / 2) * tanh((b - a) / 4)``, and
    ``b`` the same with its own exponential: no differences, so tiny masses keep all their digits.

    Args:
        epsilon: Largest loss, greater than 0.
        height: Density at the largest loss.
        edge: Mass at the largest loss under ``P``, and at the smallest under ``Q``.
    """
    losses = graded(epsilon)
    shares = np.tanh(np.diff(losses) / 4)
    weights = 2 * height * (np.append(shares, 0.0) + np.append(0.0, shares))
    p, q = weights * np.exp((losses - epsilon) / 2), weights * np.exp((-losses - epsilon) / 2)
    for side, top, bottom in ((p, -1, 0), (q, 0, -1)):
        side[top] += edge
        side[bottom] += edge * math.exp(-epsilon)
    return AtomicPair(losses, p, q)


def spread_cells(losses: Floats, p: Floats, q: Floats, p_only: float) -> AtomicPair:
    """Outputs in cells between which the loss increases, made discrete so that both sides of a cell keep their mass.

    Args:
        losses: Loss at the edges of the cells, non-decreasing, ``(cells + 1,)``.
        p: Probabilities of the cells under ``P``, ``(cells,)``.
        q: Probabilities of the cells under ``Q``, ``(cells,)``.
        p_only: Probability under ``P`` beyond all cells, counted as infinite loss.
    """
    gaps = np.maximum(-np.expm1(-np.diff(losses)), 1e-300)
    upward = (p - np.exp(np.minimum(losses[:-1], 700.0)) * q) / gaps
    upward = np.clip(upward + _ROUNDING * p / gaps, 0.0, p)  # PRIVACY: what rounding may hide goes to the larger loss
    masses = np.append(p - upward, 0.0) + np.append(0.0, upward)
    return _merged(losses, masses, masses * np.exp(-losses), p_only, 0.0)


def graded(epsilon: float, intervals: int = 800, scale: float = 20.0) -> Floats:
    """Points from ``-epsilon`` to ``epsilon``, equidistant at first, and finer at the ends than inside for large ones.

    Args:
        epsilon: Greater than 0.
        intervals: Number of intervals on each side of 0.
        scale: Distance from the end beyond which the intervals grow.
    """
    share = np.linspace(0.0, 1.0, intervals + 1)
    inner = epsilon - scale * np.sinh(share * math.asinh(epsilon / scale))
    return np.unique(np.concatenate([-inner[:-1], [0.0], inner[:-1]]))


def connect_the_dots(points: Floats, deltas: Floats) -> AtomicPair:
    """The least pair equal to its own reverse whose profile is at least the given one, up to its convexity.

    A profile is convex in ``exp(epsilon)``; so the lower convex hull of upper bounds at some points, continued by
    straight lines (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, 2022), is again an upper bound, everywhere. What
    it is below 0 follows from ``delta(-e) = 1 - exp(-e) + exp(-e) * delta(e)``. With slopes as differences of delta
    over ``expm1`` of the distance, nothing overflows and small masses are not found as differences of large ones.

    Args:
        points: Values of epsilon, increasing, the first one 0, ``(points,)``.
        deltas: Upper bounds of the profile there, ``(points,)``.
    """
    values = np.minimum(1.0, deltas * (1 + _HULL_ROUNDING))
    kept = _hull(points.tolist(), values.tolist())
    losses, values = points[kept], values[kept]
    distances, drops = np.diff(losses), -np.diff(values)
    shares = -np.expm1(-distances)
    first = (1 - values[0]) / (1 + math.exp(-losses[0]))
    p = np.append(first, drops / shares) - np.append(drops * np.exp(-distances) / shares, 0.0)
    p, q = np.maximum(p, 0.0), np.maximum(p, 0.0) * np.exp(-losses)
    last = float(values[-1])
    both = (np.concatenate([-losses[::-1], losses]), np.concatenate([q[::-1], p]), np.concatenate([p[::-1], q]))
    return _merged(*both, last, last)


def replaced_sampled(near: AtomicPair, far: AtomicPair, rate: float) -> AtomicPair:
    """Bounds ``(1 - rate) M0 + rate M1`` against ``(1 - rate) M0 + rate M2``: one record replaced in a Poisson sample.

    Two bounds hold. A replacement is a removal and an addition (:meth:`AtomicPair.chained`), which is exact for the
    Laplace mechanism: opposite values attain it. And with ``e`` the epsilon of the base,
    ``e' = log(1 + rate (exp(e) - 1))`` and ``beta = exp(e' - e)``, delta at ``e'`` is at most
    ``rate ((1 - beta) near(e) + beta far(e))`` (Balle, Barthe and Gaboardi, 2018, Theorem 2), which is better where
    two values differ no more than a value and none, as in randomized response.

    Args:
        near: Dominates ``M1`` against ``M0``, and the reverse.
        far: Dominates ``M1`` against ``M2``.
        rate: Probability that the record is in the sample.
    """
    if rate == 1:
        return far
    removed = near.sampled(rate)
    chain = removed.chained(removed.reverse)
    base = np.linspace(0.0, float(far.losses.max(initial=0.0)), 257)
    base = np.unique(np.concatenate([base, *(pair.losses[pair.losses > 0] for pair in (near, far))]))
    share = -np.expm1(-base)  # 1 - exp(-e), so that 1 - beta is (1 - rate) times this
    joint = rate * ((1 - rate) * share * near.delta(base) + (1 - (1 - rate) * share) * far.delta(base))
    points, first = np.unique(amplified(rate, base), return_index=True)
    if (chain.delta(points) <= joint[first] * (1 + _HULL_ROUNDING)).all():
        return chain
    return connect_the_dots(points, np.minimum(chain.delta(points), joint[first]))


def amplified(rate: float, epsilon: Floats) -> Floats:
    """``log(1 + rate (exp(epsilon) - 1))`` without overflow."""
    small, large = np.minimum(epsilon, 700.0), np.maximum(epsilon, 700.0)
    grown = large + math.log(rate) + np.log1p((1 - rate) / rate * np.exp(-large))
    moved = rate * np.expm1(small)
    near_zero = np.log((1 - rate) + rate * np.exp(np.minimum(small, 0.0)))  # where `1 + moved` would cancel
    return np.where(epsilon > 700, grown, np.where(moved < -0.5, near_zero, np.log1p(np.maximum(moved, -0.5))))


def _hull(points: Iterable[float], values: list[float]) -> list[int]:
    """Indices of the points on the lower convex hull in ``exp(point)``, with the mirror image on the left."""
    at = list(points)

    def falls(a: int, b: int) -> float:
        """Loss of delta from ``a`` to ``b`` per relative growth of ``exp(point)``, as seen from ``b``."""
        return (values[a] - values[b]) / -math.expm1(at[a] - at[b])

    kept: list[int] = []
    for i in range(len(at)):
        while len(kept) > 1 and falls(kept[-2], kept[-1]) <= falls(kept[-1], i) * math.exp(at[kept[-1]] - at[i]):
            kept.pop()
        kept.append(i)
    first = 0
    while first < len(kept) - 1:
        a, b = kept[first], kept[first + 1]
        if (1 - values[a]) / (1 + math.exp(-at[a])) > falls(a, b) * math.exp(at[a] - at[b]):
            break
        first += 1
    return kept[first:]


def _ordered_alike(p: Floats, r1: Floats, q: Floats, r2: Floats) -> tuple[Indices, Indices, Floats, Floats]:
    """Splits two lists of atoms, in increasing order of loss, along their common distribution ``R``.

    Args:
        p: Masses that the first list carries along, in proportion to its own.
        r1: Masses of the first list under ``R``.
        q: Masses that the second list carries along.
        r2: Masses of the second list under ``R``.

    Returns:
        For each piece the indices of its atoms in both lists, and the shares of ``p`` and ``q`` that fall to it.
    """
    i, j, widths = (np.concatenate(parts) for parts in zip(*_halves(r1, r2), strict=True))
    sums1, sums2 = np.bincount(i, widths, len(p)), np.bincount(j, widths, len(q))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [np.where(widths > 0, m[k] * (widths / n[k]), 0.0) for m, n, k in ((p, sums1, i), (q, sums2, j))]
    # PRIVACY: atoms too small under R to have a width keep their mass, beside the higher (p) or lower (q) neighbour.
    lost1, lost2 = np.flatnonzero((sums1 == 0) & (p > 0)), np.flatnonzero((sums2 == 0) & (q > 0))
    beside1 = [int(j[i > k].min(initial=len(q) - 1)) for k in lost1]
    beside2 = [int(i[j < k].max(initial=0)) for k in lost2]
    return (
        np.concatenate([i, lost1, np.array(beside2, dtype=np.intp)]),
        np.concatenate([j, np.array(beside1, dtype=np.intp), lost2]),
        np.concatenate([shares[0], p[lost1], np.zeros(len(lost2))]),
        np.concatenate([shares[1], np.zeros(len(lost1)), q[lost2]]),
    )


def _halves(r1: Floats, r2: Floats) -> list[tuple[Indices, Indices, Floats]]:
    """Pieces above and below the median of ``R``, each added up from its own end so that small masses keep digits."""
    pieces = []
    for turn in (slice(None), slice(None, None, -1)):
        ends1, ends2 = np.cumsum(r1[turn]), np.cumsum(r2[turn])
        edges = np.unique(np.concatenate([[0.0, 0.5], ends1, ends2]))
        edges = edges[edges <= 0.5]
        middles = edges[:-1] + np.diff(edges) / 2
        k1, k2 = (np.minimum(np.searchsorted(ends, middles), len(ends) - 1) for ends in (ends1, ends2))
        if turn.step:
            k1, k2 = len(r1) - 1 - k1, len(r2) - 1 - k2
        pieces.append((k1, k2, np.diff(edges)))
    return pieces


def _merged(losses: Floats, p: Floats, q: Floats, p_only: float, q_only: float) -> AtomicPair:
    """Adds up the masses of equal losses."""
    values, index = np.unique(losses, return_inverse=True)
    p, q = (np.bincount(index, masses).astype(np.float64, copy=False) for masses in (p, q))
    kept = (p > 0) | (q > 0)
    return AtomicPair(values[kept], p[kept], q[kept], p_only, q_only)


def _hockey_sticks(losses: Floats, masses: Floats, infinite: float, epsilon: Floats) -> Floats:
    at = np.asarray(epsilon, dtype=np.float64)
    flat = at.ravel()
    sums = [_block(losses, masses, flat[i : i + _BLOCK]) for i in range(0, flat.size, _BLOCK)]
    total = np.concatenate([np.zeros(0), *sums]) + infinite
    return np.minimum(1.0, total * (1 + _ROUNDING)).reshape(at.shape)


def _block(losses: Floats, masses: Floats, epsilon: Floats) -> Floats:
    result: Floats = -np.expm1(np.minimum(epsilon[:, None] - losses, 0.0)) @ masses
    return result
