"""The privacy profile of many composed steps, by contour integration.

For a loss with cumulant function ``K`` and any ``c > 0``, Parseval's identity gives

    delta(eps) = 1 / (2 pi) * integral of exp(K(z) - z eps) / (z (z + 1)) dt,   z = c + it.

The trapezoid rule with step ``h`` returns ``sum_m delta(eps + 2 pi m / h) exp(2 pi m c / h)``: its error is a sum of
non-negative terms, so it never understates delta (Poisson summation). Chernoff bounds of those terms choose ``h``.
Added explicitly: a bound of the neglected tail in ``t``, the error of the sums over ``x``, and rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from lightning_dp.accounting.loss import Floats, SampledGaussianLoss, TiltedLoss

_TOLERANCE = math.log(1e-11)  # relative size of aliases and of the tail that is aimed at
_ELEMENTS = 1_500_000  # most values of (nodes in t) * (nodes in x) that one profile may take
_RARE_ELEMENTS = 8_000_000  # the same when only a lattice is left as an alternative
_CHUNK = 500_000
_BELOW = 0.7  # position of the line relative to the best Renyi order
_GUESS_MARGIN = 5.0  # a Chernoff bound overstates log delta by about this much
_REFINEMENTS = 5  # halvings of the distance of the nodes in x
_GROWTH, _EDGES = 1.25, 60
_GRID, _STRIDE = 0.05, 16  # steps in the logarithm of c, and the first stride in them
_SPACING_GRID = 0.1  # steps in the logarithm of the spacing
_CACHED_NODES = 4096  # most nodes of a line that is kept
_SHIFT_RATIO = 3.5


@dataclass(frozen=True)
class Composed:
    """A composition: sampled steps of one direction with their counts, and one Gaussian that stands for the rest.

    Args:
        steps: Pairs of a step's loss and how often it occurs.
        rho: ``sum(count / (2 sigma^2))`` over the steps without sampling; their cumulant is ``rho * s * (s + 1)``.
    """

    steps: tuple[tuple[SampledGaussianLoss, int], ...]
    rho: float

    @property
    def largest(self) -> float:
        """Largest possible loss."""
        return math.inf if self.rho > 0 else sum(count * loss.largest for loss, count in self.steps)

    @property
    def removes(self) -> bool:
        """Whether this is the direction of removing a record."""
        return all(loss.removing for loss, _ in self.steps)

    @property
    def is_split(self) -> bool:
        """Whether the contour integrates only the losses with at least one hit."""
        return any(math.isfinite(loss.split) for loss, _ in self.steps)

    def split_for(self, epsilon: float, log_target: float) -> tuple[Composed, float] | None:
        """Splits each step's losses so that without any hit the total hardly exceeds ``epsilon``.

        A rarely sampled record leaves a sharp peak in the distribution of the loss, whose transform decays too slowly
        for the contour. The peak lies below epsilon, so that it adds next to nothing to delta, and can be left out.

        Returns:
            The split composition, and the logarithm of the bound of delta without hits (Chernoff), below
            ``log_target``; None if no split achieves that.
        """
        for parts in (1.3, 1.5, 2.0, 3.0, 5.0, 9.0, 16.0, 30.0, 60.0):
            split = replace(self, steps=tuple((loss.split_at(epsilon / parts), n) for loss, n in self.steps))
            bulk = replace(self, steps=tuple((loss.bulk, n) for loss, n in split.steps))
            log_missed = min(bulk.cumulants(k / epsilon)[0] - k for k in (30.0, 60.0, 120.0, 240.0, 480.0))
            if log_missed <= log_target:
                return split, log_missed
        return None

    @property
    def infinite(self) -> float:
        """Probability that is counted as infinite loss; adds to delta."""
        return sum(count * loss.infinite for loss, count in self.steps) * (1 + 1e-12)

    def without_tail(self, log_delta: float) -> Composed:
        """The same with the largest losses counted as infinite, at most ``1e-10`` of delta."""
        log_share = log_delta + math.log(1e-10) - math.log(sum(count for _, count in self.steps) + 1)
        log_share = float(math.floor(log_share))  # in steps, so that neighbouring questions share what is cached
        return Composed(tuple((loss.without_tail(log_share), count) for loss, count in self.steps), self.rho)

    def cumulants(self, c: float) -> tuple[float, float, float]:
        """``K(c)`` and its first two derivatives; infinities where they are too large to matter."""
        value, first, second = self.rho * c * (c + 1), self.rho * (2 * c + 1), 2 * self.rho
        for loss, count in self.steps:
            one = loss.cumulants(c)
            value, first, second = value + count * one[0], first + count * one[1], second + count * one[2]
        return value, first, second


Cumulants = Callable[[float], tuple[float, float, float]]


def chernoff_log_delta(cumulants: Cumulants, c: float, epsilon: float) -> float:
    """Logarithm of the RDP bound of delta, of order ``c + 1`` (Canonne, Kamath and Steinke, 2020, Proposition 12)."""
    return cumulants(c)[0] - c * epsilon - c * math.log1p(1 / c) - math.log1p(c)


def chernoff_epsilon(cumulants: Cumulants, c: float, log_delta: float) -> float:
    """The same bound solved for epsilon."""
    return (chernoff_log_delta(cumulants, c, 0.0) - log_delta) / c


def order_for_delta(cumulants: Cumulants, log_delta: float) -> float:
    """The ``c`` at which :func:`chernoff_epsilon` is smallest, to a few per cent."""

    def slope(c: float) -> float:
        value, first, _ = cumulants(c)
        return c * first - value + math.log1p(c) + log_delta

    return _increasing_root(slope, cumulants)


def order_for_epsilon(cumulants: Cumulants, epsilon: float) -> float:
    """The ``c`` at which :func:`chernoff_log_delta` is smallest, to a few per cent."""
    return _increasing_root(lambda c: cumulants(c)[1] - epsilon - math.log1p(1 / c), cumulants)


def _increasing_root(slope: Callable[[float], float], cumulants: Cumulants) -> float:
    """Root on a fixed geometric grid, bracketed from the scale of the loss; the end of the range when there is none.

    The grid makes neighbouring questions (one update more, say) look at the same points, which are cached.
    """

    def is_below(step: int) -> bool:
        return slope(math.exp(_GRID * step)) < 0

    scale = -math.log(math.sqrt(cumulants(0.0)[2]) + 1e-12)
    step = other = _STRIDE * round(scale / (_GRID * _STRIDE))
    stride = _STRIDE if is_below(step) else -_STRIDE
    while is_below(other) == (stride > 0):
        step, other, stride = other, other + stride, 2 * stride
        if abs(other) * _GRID > 50:
            return math.exp(_GRID * step)
    low, high = sorted((step, other))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return math.exp(_GRID * low)


@dataclass(frozen=True)
class Contour:
    """Nodes and weights of the integral on one line, from which delta follows at every epsilon.

    Attributes:
        c: Real part of the line.
        log_scale: ``K(c)``.
        t: Nodes, from 0.
        terms: ``h / pi * exp(K(z) - K(c)) / (z (z + 1))`` at the nodes, the first halved.
        excess: Sum of all error bounds, in the unit ``exp(K(c) - c * epsilon)``.
        quadrature: Share in it of the sums over ``x``.
    """

    c: float
    log_scale: float
    t: Floats
    terms: NDArray[np.complex128]
    excess: float
    quadrature: float

    def log_delta(self, epsilon: float) -> float:
        """Logarithm of an upper bound of delta."""
        phase = self.t * epsilon
        total = float(self.terms.real @ np.cos(phase) + self.terms.imag @ np.sin(phase))
        total = max(0.0, total) + self.excess + 4e-16 * abs(epsilon) * float(np.abs(self.terms) @ self.t)
        return self.log_scale - self.c * epsilon + math.log(total) if total > 0 else -math.inf

    def relative_error(self, epsilon: float) -> float:
        """Share of the explicit error bounds in delta."""
        share = math.log(max(self.excess, 1e-300)) + self.log_scale - self.c * epsilon - self.log_delta(epsilon)
        return math.exp(min(share, 0.0))

    def epsilon_error(self, epsilon: float) -> float:
        """The same in epsilon, by the local slope of ``log(delta)``."""
        drop = self.log_delta(epsilon) - self.log_delta(epsilon * (1 + 1e-4))
        return self.relative_error(epsilon) * 1e-4 / drop if drop > 0 else math.inf


def solve_epsilon(composed: Composed, order: float, log_delta: float) -> tuple[float, float]:
    """Upper bound of epsilon and of its relative error (``inf``, ``inf`` when the contour is too expensive).

    The line lies below the Chernoff point ``order``: the integrand grows little, and rare large losses, which the
    tilt at the point itself may reach, stay negligible.
    """
    c = _BELOW * order
    first = composed.cumulants(c)[1]
    line = contour(composed, c, max(0.0, first - 1 / c - 1 / (c + 1)), log_delta)
    if line is None:
        return math.inf, math.inf
    if line.log_delta(0.0) <= log_delta:
        return 0.0, 0.0
    result = _root(line, log_delta, chernoff_epsilon(composed.cumulants, order, log_delta))
    return result, line.epsilon_error(result)


def solve_rare_epsilon(composed: Composed, order: float, log_delta: float, known: float) -> tuple[float, float]:
    """As :func:`solve_epsilon`, for steps that rarely matter, by integrating only losses with at least one hit.

    Args:
        composed: Steps of one direction.
        order: The best Renyi order.
        log_delta: Logarithm of delta.
        known: An upper bound of epsilon that is not far above it.
    """
    for guess in (known * 0.9, known * 0.5, known * 0.2):
        line = _rare_line(composed, order, guess, log_delta)
        if line is None:
            break
        if line.log_delta(guess) > log_delta:
            root = _root(line, log_delta, known, guess)
            return root, line.epsilon_error(root)
        known = guess
    return known, math.inf


def solve_rare_delta(composed: Composed, order: float, epsilon: float, log_guess: float) -> tuple[float, float]:
    """As :func:`solve_delta`, by integrating only losses with at least one hit."""
    line = _rare_line(composed, order, epsilon, log_guess)
    if line is None:
        return 1.0, math.inf
    return math.exp(min(line.log_delta(epsilon), 0.0)), line.relative_error(epsilon)


def _rare_line(composed: Composed, order: float, epsilon: float, log_delta: float) -> Contour | None:
    """The line for losses with hits, valid at ``epsilon`` and above."""
    split = composed.split_for(epsilon, log_delta + _TOLERANCE)
    if split is None:
        return None
    c = _BELOW * order
    line = contour(split[0], c, epsilon, log_delta, _RARE_ELEMENTS)
    if line is None:
        return None
    return replace(line, excess=line.excess + math.exp(split[1] - line.log_scale + c * epsilon))


def _root(line: Contour, log_delta: float, high: float, low: float = 0.0) -> float:
    """Smallest epsilon above ``low`` at which the line is at most ``log_delta``; ``inf`` if not even at ``high``."""
    high *= 1 + 1e-9
    if line.log_delta(high) > log_delta:
        return math.inf
    root = float(brentq(lambda x: max(line.log_delta(x), -1e4) - log_delta, low, high, xtol=1e-300, rtol=1e-14))
    for step in (0.0, 1e-14, 1e-12, 1e-10, 1e-8):
        if line.log_delta(root * (1 + step)) <= log_delta:
            return root * (1 + step)
    return high


def solve_delta(composed: Composed, order: float, epsilon: float, log_guess: float) -> tuple[float, float]:
    """Upper bound of delta and of its relative error (1, ``inf`` when the contour is too expensive)."""
    for _ in range(3):
        line = contour(composed, _BELOW * order, epsilon, log_guess - _GUESS_MARGIN)
        if line is None:
            return 1.0, math.inf
        log_delta = line.log_delta(epsilon)
        error = line.relative_error(epsilon)
        if error <= 1e-9:
            break
        log_guess = log_delta + math.log1p(-min(error, 1 - 1e-9))
    return max(math.exp(min(log_delta, 0.0)), math.ulp(0.0)), error


def contour(
    composed: Composed, c: float, epsilon: float, log_delta: float, elements: int = _ELEMENTS
) -> Contour | None:
    """Builds the line through ``c`` for deltas around ``log_delta`` and epsilons not much below ``epsilon``.

    Returns:
        The line, or None if it would take too many nodes.
    """
    spacing = 2 * math.pi / period(composed.cumulants, c, epsilon, log_delta + _TOLERANCE)
    spacing = math.exp(_SPACING_GRID * math.floor(math.log(spacing) / _SPACING_GRID))
    log_scale = composed.cumulants(c)[0]
    target = math.exp(min(log_delta + _TOLERANCE - (log_scale - c * epsilon), 0.0))
    count, tail, shifts = _cutoff(composed, c, spacing, target)
    line: Contour | None = None
    for refinement in range(1 if composed.is_split else 0, _REFINEMENTS):
        tilts = [loss.tilted(c, refinement, shift) for (loss, _), shift in zip(composed.steps, shifts, strict=True)]
        if count * sum(len(tilt.weights) for tilt in tilts) > elements:
            break
        finer = _line(composed, tilts, c, Nodes(spacing, count), log_scale, tail)
        if line is not None and finer.quadrature > line.quadrature / 8:  # only rounding is left
            return min(line, finer, key=lambda candidate: candidate.excess)
        line = finer
        if line.quadrature <= max(20 * target, line.excess / 2):
            break
    return line


def period(
    cumulants: Callable[[float], tuple[float, float, float]], c: float, epsilon: float, log_target: float
) -> float:
    """Smallest shift of epsilon at which both neighbouring aliases are below ``exp(log_target)``.

    An alias at distance ``x`` is at most ``exp(K(c + d) - (c + d) eps - d x)`` above (``d > 0``), and the same with
    ``-d`` below (``0 < d <= c``), by Markov's inequality.
    """
    above = below = math.inf
    for factor in (1.2, 1.43, 1.8, 2.5, 4.0):
        d = (factor - 1) * c
        above = min(above, (cumulants(c + d)[0] - (c + d) * epsilon - log_target) / d)
    for factor in (0.0, 0.5, 0.75):
        d = (1 - factor) * c
        below = min(below, (cumulants(c - d)[0] - (c - d) * epsilon - log_target) / d)
    return max(above, below)


@dataclass(frozen=True)
class Nodes:
    """Equidistant nodes from 0; a key of the cache where an array could be none."""

    spacing: float
    count: int

    @property
    def t(self) -> Floats:
        """The nodes, ``(count,)``."""
        return np.asarray(self.spacing * np.arange(self.count), dtype=np.float64)


def _line(
    composed: Composed,
    tilts: Sequence[TiltedLoss],
    c: float,
    nodes: Nodes,
    log_scale: float,
    tail: float,
) -> Contour:
    """The contour with the given nodes."""
    t = nodes.t
    z = c + 1j * t
    kernel = nodes.spacing / math.pi / (z * (z + 1))
    kernel[0] /= 2
    counts = [count for _, count in composed.steps]
    (fine, hits), (coarse, coarse_hits) = _log_characteristics(composed.rho, tilts, counts, nodes)
    terms, rough = np.exp(fine) * kernel, np.exp(coarse) * kernel
    mean = composed.cumulants(c)[1]
    per_unit = sum(n * tilt.rounding for tilt, n in zip(tilts, counts, strict=True))
    relative = 1e-14 + per_unit * (np.abs(z) + 1) + 4e-16 * abs(mean) * t
    rounding = float(np.abs(terms) @ relative)
    if composed.is_split:
        terms, rough = -terms * np.expm1(hits), -rough * np.expm1(coarse_hits)
    quadrature = float(np.abs(terms - rough).sum())
    return Contour(c, log_scale, t, terms * np.exp(1j * t * mean), tail + quadrature + rounding, quadrature)


def _log_characteristics(
    rho: float, tilts: Sequence[TiltedLoss], counts: Sequence[int], nodes: Nodes
) -> NDArray[np.complex128]:
    """``K(c + it) - K(c) - i t K'(c)`` and the logarithm of the share without hits, as in :class:`TiltedLoss`."""
    result = np.zeros((2, 2, nodes.count), dtype=np.complex128)
    result[:, 0] = -rho * nodes.t**2
    one_step = _log_characteristic if nodes.count <= _CACHED_NODES else _log_characteristic.__wrapped__
    for tilt, count in zip(tilts, counts, strict=True):
        result += count * one_step(tilt, nodes)
    return result


@lru_cache(maxsize=256)
def _log_characteristic(tilt: TiltedLoss, nodes: Nodes) -> NDArray[np.complex128]:
    """What one step adds; independent of how often it occurs, and so kept for the next question."""
    rows, t = max(1, _CHUNK // len(tilt.weights)), nodes.t
    parts = [tilt.log_characteristic(t[start : start + rows]) for start in range(0, nodes.count, rows)]
    return np.concatenate(parts, axis=-1)


def _cutoff(composed: Composed, c: float, spacing: float, target: float) -> tuple[int, float, list[float]]:
    """How many nodes to take, a bound of the sum over all others of about ``target``, and how far to shift each ``x``.

    The best shift for the bound at the last node is doubled, which damps the oscillations of rare large losses too.
    With ``f = b + g`` split into bulk and hits, ``|f^n - b^n| <= (|b| + |g|)^n - |b|^n``, and ``|b| <= 1``.
    """
    edges = _edges(spacing)
    exponent, best = np.zeros(_EDGES), []
    for loss, count in composed.steps:
        least, shifts = _modulus_bounds(loss, c, spacing, composed.is_split)
        exponent += count * (np.log1p(np.exp(least)) if composed.is_split else least)
        best.append(shifts)
    modulus = np.exp(-composed.rho * edges**2) * (
        np.expm1(np.minimum(exponent, 700)) if composed.is_split else np.exp(exponent)
    )
    lengths = np.append(np.diff(edges), edges[-1]) + spacing
    tails = np.cumsum((modulus / (math.pi * (edges**2 + c**2)) * lengths)[::-1])[::-1]
    first = int(np.argmax(tails <= target)) if tails[-1] <= target else len(edges) - 1
    chosen = [
        min(loss.farthest_shift, 2 * float(shifts[first]), 2 * loss.split_edge)
        for (loss, _), shifts in zip(composed.steps, best, strict=True)
    ]
    return math.ceil(edges[first] / spacing) + 1, float(tails[first]), chosen


def _edges(spacing: float) -> Floats:
    return np.asarray(6 * spacing * _GROWTH ** np.arange(_EDGES), dtype=np.float64)


@lru_cache(maxsize=1024)
def _modulus_bounds(loss: SampledGaussianLoss, c: float, spacing: float, hits: bool) -> tuple[Floats, Floats]:
    """Least bound of one step's ``log |f|`` (or ``log |g|``) beyond each edge, and the shift that gives it."""
    shifts = [0.0, *(loss.farthest_shift * _SHIFT_RATIO**-k for k in range(7))]
    bounds = np.array([loss.tilted(c, 0, shift).modulus_bound(_edges(spacing), hits) for shift in shifts])
    return bounds.min(axis=0), np.array(shifts)[bounds.argmin(axis=0)]
