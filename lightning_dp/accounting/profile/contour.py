"""The privacy profile of many composed steps, by contour integration.

For a loss with cumulant function ``K`` and any ``c > 0``, Parseval's identity gives

    delta(eps) = 1 / (2 pi) * integral of exp(K(z) - z eps) / (z (z + 1)) dt,   z = c + it.

The trapezoid rule with step ``h`` returns ``sum_m delta(eps + 2 pi m / h) exp(2 pi m c / h)``: its error is a sum of
non-negative terms, so it never understates delta (Poisson summation). What else may be wrong has an explicit bound:
the tail beyond the last node, the sums over the output of a step, and rounding. Added to the sum they give an upper
bound of delta; taken off it, together with a Chernoff bound of the aliases, a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lightning_dp.accounting.profile.characteristic import log_characteristic
from lightning_dp.accounting.profile.cumulants import Ladder, Part, Parts
from lightning_dp.accounting.profile.line import Line
from lightning_dp.accounting.profile.losses import AtomicLoss, Complexes, Floats
from lightning_dp.accounting.profile.sampled_gaussian import Step
from lightning_dp.accounting.profile.tilted import modulus_bounds

TOLERANCE = math.log(1e-11)  # relative size of aliases and of the tail that is aimed at
_BELOW_BEST = 2  # rungs from the best order to the line
_GROWTH, _EDGES = 1.3, 6
_SPACING_GRID = 0.1  # steps in the logarithm of the spacing
_ROUNDING = 4e-15
_MOST_NODES = 1_500_000


@dataclass(frozen=True, eq=False)
class _Rare:
    """Sizes of ``f`` and of its part ``g`` above the split.

    With ``M = max(|f|, |f - g|)``, an error ``x`` of ``f`` changes ``f^n - (f - g)^n`` by at most
    ``n |g| ((M + |x|)^(n - 1) - M^(n - 1))``, and an error ``y`` of ``g`` by at most ``(M + |y|)^n - M^n``.

    Attributes:
        peaks: ``log M``, ``(parts, nodes)``.
        shares: ``|g| / M``, ``(parts, nodes)``.
        errors: ``log(1 + error of g / M)``, ``(parts, nodes)``.
    """

    peaks: Floats
    shares: Floats
    errors: Floats


@dataclass(frozen=True, eq=False)
class Sheet:
    """What a line needs to know about one step of each kind; the counts may change.

    Attributes:
        c: Real part of the line.
        t: Nodes, ``(nodes,)``.
        kernel: ``h / pi / (z (z + 1))`` at the nodes, the first halved, ``(nodes,)``.
        logs: ``log f`` of each part's loss minus its mean, ``(parts, nodes)``.
        hits: ``log(1 - g / f)`` of the parts that are split, ``(parts, nodes)``; None without a split.
        errors: ``log(1 + error of f / |f|)``, ``(parts, nodes)``; with a split over ``max(|f|, |f - g|)``.
        rare: What the bounds with a split need; None without one.
        means: Mean under the tilt, ``(parts,)``.
        tilts: Tilts at which cumulants are known, with 0 first, ``(tilts,)``.
        values: The cumulants, ``(parts, tilts)``.
        edges: Beyond the last node, ``(edges,)``.
        tails: Bounds of ``log |f|``, or of ``log(1 + |g|)``, beyond each edge, ``(parts, edges)``.
        parts: The parts, with the counts for which the line was built.
    """

    c: float
    t: Floats
    kernel: Complexes
    logs: Complexes
    hits: Complexes | None
    errors: Floats
    rare: _Rare | None
    means: Floats
    tilts: Floats
    values: Floats
    edges: Floats
    tails: Floats
    parts: Parts

    def line(self, counts: Floats, rho: float) -> Line:
        """The line for some numbers of steps.

        Args:
            counts: How often each part occurs, ``(parts,)``.
            rho: ``mu^2 / 2`` of the plain Gaussian.
        """
        exponent = counts @ self.logs
        if rho:
            exponent -= rho * self.t**2
        terms = np.exp(exponent) * self.kernel
        excess = self._tail(counts, rho)
        if self.hits is None or self.rare is None:
            excess += float(np.abs(terms) @ grown(counts @ self.errors + 1e-14))
        else:
            sizes = np.abs(self.kernel) * np.exp(counts @ self.rare.peaks - rho * self.t**2)
            whole, hidden = grown(counts @ self.errors), grown(counts @ self.rare.errors)
            doubt = (counts @ self.rare.shares) * whole + hidden * (1 + whole)
            terms *= -np.expm1(counts @ self.hits)
            excess += float(sizes @ doubt) + 1e-14 * float(np.abs(terms).sum())
        values = counts @ self.values
        if rho:
            values += rho * self.tilts * (self.tilts + 1)
        mean = float(counts @ self.means) + rho * (2 * self.c + 1)
        return Line(
            self.c,
            float(values[self.index]),
            self.t,
            terms,
            mean,
            excess,
            self.period,
            self.tilts,
            values,
            self.infinite(counts),
        )

    @cached_property
    def is_finite(self) -> bool:
        """Whether no loss is infinite."""
        return self.parts.infinite == 0

    @cached_property
    def index(self) -> int:
        """Index of ``c`` among the tilts."""
        return int(np.searchsorted(self.tilts, self.c))

    @property
    def period(self) -> float:
        """Distance of the aliases."""
        return 2 * math.pi / float(self.t[1])

    def renyi_epsilon(self, counts: Floats, rho: float, log_delta: float) -> float:
        """The Renyi bound at the best of the tilts (Canonne, Kamath and Steinke, 2020, Proposition 12)."""
        values = (counts @ self.values)[1:] + rho * self._rho_factors
        return float(((values - log_delta) / self.tilts[1:] - self._renyi_corrections).min())

    @cached_property
    def _rho_factors(self) -> Floats:
        return np.asarray(self.tilts[1:] * (self.tilts[1:] + 1), dtype=np.float64)

    @cached_property
    def _renyi_corrections(self) -> Floats:
        tilts = self.tilts[1:]
        return np.asarray(np.log1p(1 / tilts) + np.log1p(tilts) / tilts, dtype=np.float64)

    def infinite(self, counts: Floats) -> tuple[float, float]:
        """Bounds of the probability of an infinite loss."""
        if self.is_finite:
            return 0.0, 0.0
        changed = replace(self.parts, counts=tuple(counts.tolist()))
        return changed.truly_infinite, changed.infinite

    def _tail(self, counts: Floats, rho: float) -> float:
        exponent = counts @ self.tails
        moduli = np.expm1(np.minimum(exponent, 700.0)) if self.hits is not None else np.exp(exponent)
        if rho:
            moduli *= np.exp(-rho * self.edges**2)
        return float(moduli @ self.tail_weights)

    @cached_property
    def tail_weights(self) -> Floats:
        """What a modulus of 1 would add beyond the last node, between neighbouring edges and beyond them."""
        return _tail_weights(self.edges, self.c, float(self.t[1]))


def grown(errors: Floats) -> Floats:
    """Relative error of a product from the sum of the relative errors of its factors."""
    return np.asarray(np.expm1(np.minimum(errors, 700.0)), dtype=np.float64)


def build(
    parts: Parts, ladder: Ladder, epsilon: float, log_delta: float, elements: int, below: int = _BELOW_BEST
) -> Line | None:
    """The line of :func:`sheet` for the counts of the parts, or None."""
    built = sheet(parts, ladder, epsilon, log_delta, elements, below)
    return None if built is None else built.line(np.asarray(parts.counts, dtype=np.float64), parts.rho)


def sheet(
    parts: Parts, ladder: Ladder, epsilon: float, log_delta: float, elements: int, below: int = _BELOW_BEST
) -> Sheet | None:
    """The line below the best order, for deltas around ``log_delta`` and epsilons around ``epsilon``.

    The line lies below the best order: the integrand grows little, and rare large losses, which the tilt at the point
    itself may reach, stay negligible.

    Args:
        parts: What is integrated.
        ladder: Cumulants around the best order, of the parts without their split.
        epsilon: Where delta is wanted.
        log_delta: About the logarithm of delta there.
        elements: Most values of nodes in ``t`` times nodes in ``x``.
        below: Rungs from the best order to the line.

    Returns:
        The sheet, or None if it would take too many nodes.
    """
    index = max(1, ladder.best - below)
    c, log_scale = float(ladder.tilts[index]), float(ladder.values[index])
    log_target = log_delta + TOLERANCE
    tilts = np.append(0.0, ladder.tilts)
    period = _period(tilts, np.append(0.0, ladder.values), index + 1, epsilon, log_target)
    spacing = math.exp(_SPACING_GRID * math.floor(math.log(2 * math.pi / period) / _SPACING_GRID))
    singles, means = ladder.single_values, ladder.single_means
    variance = (ladder.means[index + 1] - ladder.means[index - 1]) / (ladder.tilts[index + 1] - ladder.tilts[index - 1])
    target = math.exp(min(log_target - log_scale + c * epsilon, 0.0))
    start = math.sqrt(-2 * math.log(target) / max(variance, 1e-290)) if 0 < target < 1 else 10 * spacing
    most = min(elements / (sum(_size(part, float(ladder.tilts[-1])) for part in parts.parts) + 20), _MOST_NODES)
    cutoff = _cutoff(parts, singles[index], (c, float(ladder.tilts[-1])), spacing, start, target, most)
    if cutoff is None:
        return None
    count, edges, tails = cutoff
    t = np.asarray(spacing * np.arange(count), dtype=np.float64)
    z = c + 1j * t
    kernel = np.asarray(spacing / math.pi / (z * (z + 1)), dtype=np.complex128)
    kernel[0] /= 2
    shape = len(parts.parts), count
    logs, errors = np.empty(shape, dtype=np.complex128), np.empty(shape)
    hits = np.zeros(shape, dtype=np.complex128) if parts.is_split else None
    for row, (part, mean) in enumerate(zip(parts.parts, means[index], strict=True)):
        logs[row], without_hits, unit = log_characteristic(part, c, float(mean), spacing, count)
        errors[row] = (part.whole.error if isinstance(part, Step) else 0.0) + _ROUNDING * unit * np.abs(z)
        if hits is not None and without_hits is not None:
            hits[row] = without_hits
    peaks = logs.real if hits is None else logs.real + np.maximum(hits.real, 0.0)
    inverse = np.exp(-np.minimum(peaks, 0.0))
    errors = np.log1p(errors * inverse)
    rare = None
    if hits is not None:
        hidden = [part.error if isinstance(part, Step) and part.is_split else 0.0 for part in parts.parts]
        shares = np.abs(np.expm1(hits)) * np.exp(np.minimum(-hits.real, 0.0))
        rare = _Rare(peaks, shares, np.log1p(np.array(hidden)[:, None] * inverse))
    values = np.concatenate((np.zeros((shape[0], 1)), singles.T), axis=1)
    return Sheet(c, t, kernel, logs, hits, errors, rare, means[index], tilts, values, edges, tails, parts)


def _period(tilts: Floats, values: Floats, index: int, epsilon: float, log_target: float) -> float:
    """Smallest distance at which the neighbouring aliases on both sides are below ``exp(log_target)``."""
    exponents = values - tilts * epsilon - log_target
    below = exponents[:index] / (tilts[index] - tilts[:index])
    above = exponents[index + 1 :] / (tilts[index + 1 :] - tilts[index])
    return max(float(below.min()), float(above.min()), 1e-290)


def _cutoff(
    parts: Parts, singles: Floats, tilts: tuple[float, float], spacing: float, start: float, target: float, most: float
) -> tuple[int, Floats, Floats] | None:
    """How many nodes to take so that all others add at most ``target``, with bounds of the modulus beyond.

    Args:
        parts: What is integrated.
        singles: ``K(c)`` of one step of each kind, ``(parts,)``.
        tilts: ``c``, and the largest tilt whose nodes are at hand.
        spacing: Distance of the nodes in ``t``.
        start: Where to look first.
        target: What the rest may add.
        most: Largest number of nodes.

    Returns:
        The number, edges from the last node on, and for each part the bounds beyond each edge, as in :class:`Sheet`.
    """
    counts = np.asarray(parts.counts, dtype=np.float64)
    first = max(0.6 * start, 6 * spacing)
    while first < most * spacing:
        edges = np.asarray(first * _GROWTH ** np.arange(_EDGES), dtype=np.float64)
        rows = np.zeros((len(parts.parts), _EDGES))
        for row, (part, cumulant) in enumerate(zip(parts.parts, singles, strict=True)):
            if isinstance(part, Step):
                bounds = modulus_bounds(part, tilts, float(cumulant), edges, parts.is_split)
                rows[row] = np.log1p(np.exp(bounds)) if parts.is_split else np.minimum(bounds, 0.0)
        enough = np.nonzero(_tails(counts @ rows, parts.rho, edges, tilts[0], spacing, parts.is_split) <= target)[0]
        if len(enough):
            count = 4 * math.ceil((edges[enough[0]] / spacing + 1) / 4)
            return (count, edges[enough[0] :], rows[:, enough[0] :]) if count <= most else None
        first = float(edges[-1])
    return None


def _tails(exponent: Floats, rho: float, edges: Floats, c: float, spacing: float, split: bool) -> Floats:
    """Bounds of the sum over all nodes beyond each edge.

    With ``f = b + g`` split into bulk and hits, ``|f^n - b^n| <= (|b| + |g|)^n - |b|^n``, and ``|b| <= 1``.

    Args:
        exponent: ``n log |f|`` beyond each edge, or ``n log(1 + |g|)``, of all parts together, ``(edges,)``.
        rho: ``mu^2 / 2`` of the plain Gaussian.
        edges: Increasing, ``(edges,)``.
        c: Tilt.
        spacing: Distance of the nodes.
        split: Whether only hits are integrated.
    """
    moduli = np.exp(-rho * edges**2) * (np.expm1(np.minimum(exponent, 700.0)) if split else np.exp(exponent))
    return np.asarray(np.cumsum((moduli * _tail_weights(edges, c, spacing))[::-1])[::-1], dtype=np.float64)


def _tail_weights(edges: Floats, c: float, spacing: float) -> Floats:
    """What a modulus of 1 would add to the sum between neighbouring edges, and beyond the last one."""
    weights = (np.diff(edges, append=math.inf) + spacing) / (edges**2 + c**2)
    weights[-1] = math.atan(c / edges[-1]) / c + spacing / (edges[-1] ** 2 + c**2)
    return np.asarray(weights / math.pi, dtype=np.float64)


def _size(part: Part, largest: float) -> int:
    """About how many nodes the sums of a part have, for each node in ``t``."""
    if isinstance(part, AtomicLoss):
        return len(part.losses)
    hits = len(part.nodes(largest).x) // 2 if part.is_split else 0
    return 2 * len(part.whole.nodes(largest).x) + hits


def epsilon_guess(ladder: Ladder) -> float:
    """About the epsilon whose delta the line of this ladder is best for."""
    index = max(0, ladder.best - _BELOW_BEST)
    c = float(ladder.tilts[index])
    return max(0.0, float(ladder.means[index]) - 1 / c - 1 / (c + 1))
