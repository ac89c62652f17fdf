"""The ways to bound epsilon or delta of one direction, from the cheapest to the last resort.

Each takes the parts, the delta or epsilon at which the other is wanted, what is known so far, and a value at which an
upper bound is good enough; it returns an interval that contains the exact value.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_dp.accounting.profile import contour, lattice, narrowing
from lightning_dp.accounting.profile.closed_form import gaussian_delta, gaussian_epsilon
from lightning_dp.accounting.profile.cumulants import Parts, ladder_for_delta, ladder_for_epsilon
from lightning_dp.accounting.profile.interval import Interval
from lightning_dp.accounting.profile.line import Line, lower, solve

_FEW_ELEMENTS = 4_000_000  # nodes in t times nodes in x, for the first method
_MORE_ELEMENTS = 60_000_000  # the same for the later one
_GUESS_MARGIN = 5.0  # a Renyi bound overstates log delta by about this much
_LIMITS = (4.0, 0.5, 0.3, 1.5)  # of the fine lattice, in units of the best bound so far


def _renyi_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """The Renyi bound at the best order, which the contour takes along where there is one."""
    if parts.is_smooth:
        return best
    log_delta = math.log(delta - parts.infinite)
    return Interval(0.0, ladder_for_delta(parts, log_delta).renyi_epsilon(log_delta))


def _contour_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """The contour integral over all losses."""
    return _line_epsilon(parts, delta, best, known, _FEW_ELEMENTS) if parts.is_smooth else best


def _contour_without_tail_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """The same with rare huge losses counted as infinite."""
    if not parts.is_smooth:
        return best
    return _line_epsilon(parts.without_tail(math.log(delta)), delta, best, known, _MORE_ELEMENTS)


def _line_epsilon(parts: Parts, delta: float, best: Interval, known: float, elements: int) -> Interval:
    log_delta = math.log(delta - parts.infinite)
    ladder = ladder_for_delta(parts, log_delta)
    best = best.and_also(Interval(0.0, ladder.renyi_epsilon(log_delta)))
    if best.upper <= known:
        return best
    guess = contour.epsilon_guess(ladder)
    line = contour.build(parts, ladder, guess, log_delta, elements)
    return best if line is None else best.and_also(_read_epsilon(line, delta, 0.0, best.upper, known))


def _read_epsilon(line: Line, delta: float, low: float, high: float, known: float) -> Interval:
    """The interval that a line gives, above ``low``."""
    log_delta = math.log(delta - line.infinite[1])
    start = max(low, known)
    if line.upper_log_delta(start) <= log_delta:
        return Interval(0.0, start)
    upper = solve(line, log_delta, start, high)
    if math.isinf(upper):
        return Interval(0.0, upper)
    return Interval(lower(line, delta, upper), upper)


def _decomposed_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """Large losses counted exactly, and lines for the others, for steps that rarely matter."""
    return narrowing.epsilon(parts, delta, best, known) if parts.is_smooth and parts.may_split else best


def _limited_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """A fine lattice for small losses, with large ones counted exactly, for epsilon far below one step's loss."""
    if best.is_close or not lattice.may_be_limited(parts):
        return best
    least = -lattice.farthest_epsilon(parts, 0.0)
    chosen = None
    for share in _LIMITS:
        limit = share * best.upper + 2 * least
        upper = lattice.epsilon(parts, delta, limit=limit)
        if upper > lattice.farthest_epsilon(parts, limit):
            break
        if upper < best.upper:
            best, chosen = best.and_also(Interval(0.0, upper)), limit
    if chosen is None:
        return best
    lower = lattice.epsilon(parts, delta, upper=False, limit=chosen)
    return best.and_also(Interval(min(lower, best.upper), best.upper))


def _lattice_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """A loss distribution on a lattice, moved up."""
    return best if best.is_close else Interval(0.0, lattice.epsilon(parts, delta))


def _lattice_lower_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """A loss distribution on a lattice, moved down."""
    if best.is_close:
        return best
    return Interval(min(lattice.epsilon(parts, delta, upper=False), best.upper), best.upper)


def _unsampled_epsilon(parts: Parts, delta: float, best: Interval, known: float) -> Interval:
    """The same steps without sampling, where that is all Gaussian; it always costs at least as much."""
    mu = parts.unsampled_mu
    return best if mu is None else best.and_also(Interval(0.0, gaussian_epsilon(mu, delta)))


def _renyi_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """The Renyi bound at the best order."""
    if parts.is_smooth:
        return best
    return Interval(0.0, math.exp(ladder_for_epsilon(parts, epsilon).renyi_log_delta(epsilon)) + parts.infinite)


def _contour_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """The contour integral over all losses."""
    return _line_delta(parts, epsilon, best, known, _FEW_ELEMENTS) if parts.is_smooth else best


def _contour_without_tail_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """The same with rare huge losses counted as infinite."""
    if not parts.is_smooth:
        return best
    return _line_delta(_finite(parts, epsilon), epsilon, best, known, _MORE_ELEMENTS)


def _finite(parts: Parts, epsilon: float) -> Parts:
    """The parts without a tail that is negligible at ``epsilon``; repeated while the Renyi bound of delta falls."""
    log_best, finite = 0.0, parts
    for _ in range(4):
        log_delta = ladder_for_epsilon(finite, epsilon).renyi_log_delta(epsilon)
        if log_delta > log_best - 1 and finite is not parts:
            break
        log_best = log_delta
        finite = parts.without_tail(log_best - 10)
    return finite


def _line_delta(parts: Parts, epsilon: float, best: Interval, known: float, elements: int) -> Interval:
    ladder = ladder_for_epsilon(parts, epsilon)
    log_delta = ladder.renyi_log_delta(epsilon)
    best = best.and_also(Interval(0.0, math.exp(log_delta) + math.ulp(0.0) + parts.infinite))
    log_guess = min(log_delta, math.log(best.upper)) - _GUESS_MARGIN
    for _ in range(3):
        if best.upper <= known:
            break
        line = contour.build(parts, ladder, epsilon, log_guess, elements)
        if line is None:
            break
        found = _read_delta(line, epsilon)
        best = best.and_also(found)
        if found.is_accurate:
            break
        log_guess = min(log_guess - 3, math.log(max(found.upper - found.lower, 1e-300)))
    return best


def _read_delta(line: Line, epsilon: float) -> Interval:
    lower, upper = math.exp(line.lower_log_delta(epsilon)), math.exp(line.upper_log_delta(epsilon))
    return Interval(lower * (1 - line.infinite[1]) + line.infinite[0], upper + line.infinite[1] + math.ulp(0.0))


def _decomposed_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """Large losses counted exactly, and lines for the others, for steps that rarely matter."""
    if not parts.is_smooth or not parts.may_split or epsilon == 0:
        return best
    return narrowing.delta(parts, epsilon, best, known)


def _limited_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """A fine lattice for small losses, with large ones counted exactly, for epsilon far below one step's loss."""
    if best.is_close or not lattice.may_be_limited(parts):
        return best
    limit = 4 * (epsilon - lattice.farthest_epsilon(parts, 0.0))
    upper, lower = (lattice.delta(parts, epsilon, upper=side, limit=limit) for side in (True, False))
    return best.and_also(Interval(min(lower, best.upper), upper))


def _lattice_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """A loss distribution on a lattice, moved up."""
    return best if best.is_close else Interval(0.0, lattice.delta(parts, epsilon))


def _lattice_lower_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """A loss distribution on a lattice, moved down."""
    if best.is_close:
        return best
    return Interval(min(lattice.delta(parts, epsilon, upper=False), best.upper), best.upper)


def _unsampled_delta(parts: Parts, epsilon: float, best: Interval, known: float) -> Interval:
    """The same steps without sampling, where that is all Gaussian; it always costs at least as much."""
    mu = parts.unsampled_mu
    return best if mu is None else best.and_also(Interval(0.0, gaussian_delta(mu, epsilon)))


Method = Callable[[Parts, float, Interval, float], Interval]
EPSILON_METHODS: tuple[Method, ...] = (
    _renyi_epsilon,
    _contour_epsilon,
    _contour_without_tail_epsilon,
    _unsampled_epsilon,
    _decomposed_epsilon,
    _limited_epsilon,
    _lattice_epsilon,
    _lattice_lower_epsilon,
)
DELTA_METHODS: tuple[Method, ...] = (
    _renyi_delta,
    _contour_delta,
    _contour_without_tail_delta,
    _unsampled_delta,
    _decomposed_delta,
    _limited_delta,
    _lattice_delta,
    _lattice_lower_delta,
)
