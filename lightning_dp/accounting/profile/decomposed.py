"""Delta as a sum over what kind of losses occur: large ones, which count exactly, smaller hits, and neither.

One line of integration has to serve all losses at once, and fails where rare ones are far larger than epsilon: tilts
that suit the others make them dominate. But where the loss of one step is so large that the total exceeds epsilon
whatever the other steps say, its size no longer matters: the event ``A`` that there is such a step adds
``P(A) - exp(epsilon) Q(A)``. Without them a line needs no more nodes than the scale of epsilon asks for.

Whether a step counts as large, or as a hit, is decided at random given its output, with a probability that changes
smoothly. That keeps transforms short, and is the same under ``P`` and ``Q``, so that losses stay what they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr

from lightning_dp.accounting.profile import contour
from lightning_dp.accounting.profile.closed_form import smallest
from lightning_dp.accounting.profile.cumulants import Parts, ladder_for_delta, ladder_for_epsilon
from lightning_dp.accounting.profile.interval import Interval
from lightning_dp.accounting.profile.line import Line
from lightning_dp.accounting.profile.sampled_gaussian import Step

_ROUNDING = 1e-12  # relative error of a probability
_DOUBT = math.log(1e-11)  # of events that are left out, relative to delta
_DISTANCES = (3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0)  # from a loss to a cut, in widths of its edge
_TILTS = np.append(0.0, np.geomspace(0.1, 100.0, 40))
_FARTHEST = 300.0  # epsilon, so that its exponential and the inverse stay in range
_SHARE = 0.2  # width of the edge of a cut over that of a split: softer ones let strong tilts see past them
_SPLIT = 3.0  # epsilon over the loss of a hit, where losses without hits have a line
_FEW_ELEMENTS = 4_000_000  # nodes in t times nodes in x, for lines without hits
_MORE_ELEMENTS, _MOST_ELEMENTS = 30_000_000, 60_000_000  # the same with hits, for rough lines and for exact ones
_ACCURATE, _ROUGH = 1e-8, 1e-2  # relative errors of delta
_BELOW_BEST = 1  # rungs from the best order to a line without large losses
_SHARES = (1e-12, 1e-11, 1e-10, 1e-9, *(3e-9 * 2.0**k for k in range(26)))  # how far below the upper bound to look


@dataclass(frozen=True)
class Large:
    """The event that the loss of some step is large.

    Attributes:
        parts: The parts, with a cut above which losses are large.
        doubt: Bound of what the event adds where the total is below epsilon nevertheless.
        is_exact: Whether ``doubt`` holds; otherwise large losses count as infinite.
    """

    parts: Parts
    doubt: float = 0.0
    is_exact: bool = False

    def delta(self, epsilon: float) -> Interval:
        """What the event adds to delta: ``P(A) - exp(epsilon) Q(A)``, without cancellation for small epsilon."""
        if not self.is_exact:
            return Interval(self.parts.truly_infinite, self.parts.infinite)
        absent, excess = self._logs
        difference, q = -math.exp(absent) * math.expm1(excess), -math.expm1(absent)
        growth = math.expm1(epsilon) * q
        slack = _ROUNDING * (difference + growth) + 1e-14 * q
        return Interval(max(0.0, difference - growth - slack), difference - growth + slack + self.doubt)

    @cached_property
    def _logs(self) -> tuple[float, float]:
        """``log Q(not A)``, and ``log P(not A)`` minus that."""
        absent = excess = 0.0
        for step, n in _steps(self.parts):
            q, difference = step.cut_probabilities
            absent += n * math.log1p(-q)
            excess += n * math.log1p(-difference / (1 - q))
        return absent, excess


def count_large(parts: Parts, epsilon: float, log_delta: float, share: float) -> Large:
    """Tells losses that decide alone that the total exceeds ``epsilon``.

    On ``A`` the total is below epsilon only if a large loss is below some ``v``, or the others are below
    ``epsilon - v``. What that may add is at most ``exp(epsilon)`` times its probability under ``Q``. The first has a
    bound in closed form, the second is Chernoff's, from the cumulants of the other direction (by Jensen's inequality
    leaving a step out does not raise them). Where the other direction has large losses too, for discrete losses, and
    for huge epsilons, only what is negligible counts as large.

    Args:
        parts: All losses.
        epsilon: Up to which the answer is wanted.
        log_delta: About the logarithm of delta there.
        share: Width of the edges, over that of a split.
    """
    steps = _steps(parts)
    removing = len(steps) == len(parts.parts) and all(step.loss.direction == "remove" for step, _ in steps)
    if not removing or epsilon > _FARTHEST:
        return Large(parts.without_tail(log_delta, share))
    opposite = parts.with_steps(lambda step: Step(replace(step.loss, direction="add")))
    ladder = ladder_for_delta(opposite, _DOUBT)
    rest = max(0.0, float(((ladder.values - _DOUBT) / ladder.tilts).min()))
    below, cut, log_goal = 0.0, [], log_delta + _DOUBT - epsilon
    for step, n in steps:
        changed, log_below = _cut(step, (epsilon + rest) * (1 + 1e-9), share, log_goal - math.log(n))
        cut.append(changed)
        below += n * math.exp(log_below)
    large = sum(n * step.cut_probabilities[0] for step, (_, n) in zip(cut, steps, strict=True))
    below += large * math.exp(min(0.0, float((ladder.values - ladder.tilts * rest).min())))
    doubt = math.exp(epsilon) * below * (1 + 1e-9)
    return Large(replace(parts, parts=tuple(cut)), doubt, is_exact=True)


def _steps(parts: Parts) -> list[tuple[Step, int]]:
    return [(part, n) for part, n in zip(parts.parts, parts.counts, strict=True) if isinstance(part, Step)]


def _cut(step: Step, loss: float, share: float, log_target: float) -> tuple[Step, float]:
    """The step cut so far above a loss that less is hardly ever cut, and the logarithm of the bound of that."""
    for distance in _DISTANCES:
        changed = step.cut_above(loss, distance, share)
        log_below = _log_cut_below(changed.cut, changed.edge, changed.cut - distance * changed.edge)
        if log_below <= log_target:
            break
    return changed, min(0.0, log_below)


def _log_cut_below(cut: float, edge: float, x: float) -> float:
    """Bounds the probability under ``N(0, 1)`` that an output below ``x`` is cut (Chernoff, the cut itself exactly)."""
    tilts = _TILTS / edge
    return float((tilts * x + tilts**2 / 2 + log_ndtr((-tilts - cut) / math.hypot(1.0, edge))).min())


@dataclass(frozen=True, eq=False)
class Decomposed:
    """Bounds of delta between two epsilons.

    Attributes:
        low: Smallest epsilon for which the bounds hold.
        high: Largest epsilon for which they do.
        large: The event that some loss is large.
        lines: Lines over all other losses, each over other ones.
        missed: Bound of what no line integrates.
        doubled: Bound of what two lines integrate.
    """

    low: float
    high: float
    large: Large
    lines: tuple[Line, ...]
    missed: float = 0.0
    doubled: float = 0.0

    def upper(self, epsilon: float) -> float:
        """Upper bound of delta."""
        total = sum(math.exp(line.upper_log_delta(epsilon)) for line in self.lines)
        total += self.large.delta(epsilon).upper + self.missed
        return min(1.0, total * (1 + _ROUNDING) + math.ulp(0.0))

    def lower(self, epsilon: float) -> float:
        """Lower bound of delta."""
        total = sum(math.exp(min(0.0, line.lower_log_delta(epsilon))) for line in self.lines)
        total += self.large.delta(epsilon).lower - self.doubled
        return max(0.0, total * (1 - _ROUNDING))

    def epsilon(self, delta: float) -> Interval:
        """Bounds of epsilon, as far as they lie in the range; the upper one is ``inf`` if it does not."""
        if self.upper(self.high) > delta:
            lower = self.high if self.lower(self.high) >= delta else self.low if self.lower(self.low) >= delta else 0.0
            return Interval(lower, math.inf)
        if self.upper(self.low) <= delta:
            return Interval(0.0, self.low)
        upper = smallest(self.upper, delta, self.high, self.low)
        for share in _SHARES:
            lower = max(upper * (1 - share), self.low)
            if self.lower(lower) >= delta:
                return Interval(lower, upper)
        return Interval(0.0, upper)


def decompose(parts: Parts, low: float, high: float, log_delta: float, rough: float = 0.0) -> Decomposed | None:
    """Bounds of delta for epsilons in ``[low, high]``, from the first decomposition that is accurate, or the best one.

    Args:
        parts: All losses.
        low: Smallest epsilon.
        high: Largest epsilon.
        log_delta: About the logarithm of delta there.
        rough: By how much errors may be larger than where all are aimed at, as a logarithm.

    Returns:
        The bounds, or None if all would take too many nodes.
    """
    middle, best, least = math.sqrt(low * high), None, math.inf
    elements = _MORE_ELEMENTS if rough else _MOST_ELEMENTS
    for option in (_without_large, _with_hits, _with_hits_and_bulk) if low > 0 else (_without_large,):
        try:
            found = option(parts, low, high, log_delta + rough, elements)
        except ArithmeticError:  # beyond the range of floats, or of sums over nodes
            continue
        if found is not None:
            upper = found.upper(middle)
            error = (upper - found.lower(middle)) / max(upper, math.exp(log_delta))
            if error < least:
                best, least = found, error
            if error <= min(_ACCURATE * math.exp(rough), _ROUGH):
                break
    return best


def _without_large(parts: Parts, low: float, high: float, log_goal: float, elements: int) -> Decomposed | None:
    """One line for all losses that are not large."""
    large = count_large(parts, high, log_goal, _SHARE)
    ladder = ladder_for_epsilon(large.parts, low)
    line = contour.build(large.parts, ladder, low, log_goal, _FEW_ELEMENTS, _BELOW_BEST)
    return None if line is None else Decomposed(low, high, large, (line,))


def _with_hits(parts: Parts, low: float, high: float, log_goal: float, elements: int) -> Decomposed | None:
    """One line for losses with hits; those without are negligible."""
    large = count_large(parts, high, log_goal, _SHARE)
    found = large.parts.split_for(low, log_goal + contour.TOLERANCE)
    if found is None:
        return None
    line = contour.build(found[0], ladder_for_epsilon(large.parts, low), low, log_goal, elements)
    return None if line is None else Decomposed(low, high, large, (line,), missed=math.exp(found[1]))


def _with_hits_and_bulk(parts: Parts, low: float, high: float, log_goal: float, elements: int) -> Decomposed | None:
    """One line for losses with hits, and another one for those without."""
    large = count_large(parts, high, log_goal, _SHARE)
    split = large.parts.with_steps(lambda step: step.split_at(low / _SPLIT))
    bulk = split.with_steps(lambda step: step.bulk)
    first = contour.build(bulk, ladder_for_epsilon(bulk, low), low, log_goal, _FEW_ELEMENTS, _BELOW_BEST)
    if first is None:
        return None
    second = contour.build(split, ladder_for_epsilon(large.parts, low), low, log_goal, elements)
    if second is None:
        return None
    return Decomposed(low, high, large, (first, second), doubled=sum(n * _doubled(step) for step, n in _steps(split)))


def _doubled(step: Step) -> float:
    """Bounds the probability that an output is cut, and below the split nevertheless."""
    middle = (step.split * step.edge + step.cut * step.split_edge) / (step.edge + step.split_edge)
    total = 0.0
    for mean in (0.0, 1 / step.loss.sigma):
        total += math.exp(min(0.0, _log_cut_below(step.cut - mean, step.edge, middle - mean)))
        total += math.exp(min(0.0, _log_cut_below(mean - step.split, step.split_edge, mean - middle)))
    return total
