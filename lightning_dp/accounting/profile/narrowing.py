"""Epsilon and delta from decompositions: cheap ones far and wide, and an exact one near the answer."""

from __future__ import annotations

import math

from lightning_dp.accounting.profile.closed_form import step_delta
from lightning_dp.accounting.profile.cumulants import Parts, ladder_for_delta
from lightning_dp.accounting.profile.decomposed import Decomposed, decompose
from lightning_dp.accounting.profile.interval import Interval
from lightning_dp.accounting.profile.sampled_gaussian import Step

_RANGE = 1.5  # of a rough decomposition, on both sides of a guess
_RANGES = 16  # how many are tried
_ROUGH = 16.0  # by how much its errors may be larger, as a logarithm: about 1e-4 of delta
_FARTHEST, _LEAST = 3.5, 1e-4  # from one guess to the next, as a logarithm, and to the next but for what is known
_COARSER = 1.3  # from a guess that takes too many nodes to the next, at most
_RENYI_MARGIN = 5.0  # a Renyi bound overstates log delta by about this much
_MANY_HITS = 2.0  # epsilon from which on several hits are likely to matter
_DELTA_TRIES = 3


def epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """Bounds of epsilon, better than the best so far; an upper bound of at most ``known`` is good enough."""
    log_delta, guess, spread, is_positive = math.log(delta), 0.0, _RANGE, best.lower > 0
    for _ in range(_RANGES):
        width, is_near = best.upper - best.lower, best.upper <= _RANGE**2 * 1.01 * best.lower
        if is_near:
            found = decompose(parts, best.lower, best.upper, log_delta)
        else:
            guess = guess or _first_guess(parts, delta, best)
            found = decompose(parts, guess / spread, guess * spread, log_delta, _ROUGH)
        if found is not None:
            best = best.and_also(found.epsilon(delta))
        if found is not None and best.upper == found.low and not is_positive:
            if _is_enough(parts, found.low, delta):
                return Interval(0.0, 0.0)
            is_positive = True
        if best.upper <= known or best.is_accurate or (is_near and best.upper - best.lower > width / 2):
            break
        if found is not None and not is_near:
            guess = _next_guess(found, log_delta, best)
        elif not is_near:  # too many nodes, all the more so farther below
            guess, spread = min(_COARSER * guess, math.sqrt(guess * best.upper)), math.sqrt(spread)
    return best


def _is_enough(parts: Parts, high: float, delta: float) -> bool:
    """Whether delta is enough for an epsilon of 0."""
    for rough in (_ROUGH, 0.0):
        found = decompose(parts, 0.0, high, math.log(delta), rough)
        if found is None or found.lower(0.0) > delta:
            return False
        if found.upper(0.0) <= delta:
            return True
    return False


def delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """Bounds of delta, better than the best so far."""
    guess = best.upper
    for _ in range(_DELTA_TRIES):
        found = decompose(parts, epsilon, epsilon, math.log(guess))
        if found is None:
            break
        best = best.and_also(Interval(found.lower(epsilon), found.upper(epsilon)))
        if best.is_accurate or best.upper <= known:
            break
        guess = max(best.upper - best.lower, 1e-300)
    return best


def _first_guess(parts: Parts, delta: float, best: Interval) -> float:
    """Epsilon if a single hit matters, or where that is large the one that the Renyi bound is near."""
    one = min(_one_hit(parts, delta), best.upper / _RANGE)
    if one < _MANY_HITS:
        return one
    ladder = ladder_for_delta(parts.without_tail(math.log(delta)), math.log(delta))
    return max(one, best.upper - _RENYI_MARGIN / float(ladder.tilts[ladder.best]))


def _one_hit(parts: Parts, delta: float) -> float:
    """About the epsilon of steps of which hardly more than one ever matters: their deltas add up."""
    steps = [(part.loss, n) for part, n in zip(parts.parts, parts.counts, strict=True) if isinstance(part, Step)]
    low, high = -60.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        total = sum(n * step_delta(loss, math.exp(middle)) for loss, n in steps)
        low, high = (middle, high) if total > delta else (low, middle)
    return math.exp(low)


def _next_guess(found: Decomposed, log_delta: float, best: Interval) -> float:
    """Where the line through both ends of a range, in logarithms, reaches delta; between the bounds in any case."""
    near, far = (math.log(found.upper(end)) - log_delta for end in (found.low, found.high))
    power = max(near - far, 1e-9) / math.log(found.high / found.low)
    start, gap = (found.high, far) if far > 0 else (found.low, near)
    guess = start * math.exp(max(-_FARTHEST, min(_FARTHEST, gap / power)))
    low = max(best.lower, best.upper * _LEAST)
    return guess if best.lower < guess < best.upper else math.sqrt(low * best.upper)
