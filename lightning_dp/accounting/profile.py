"""Epsilon and delta of any composition of Poisson-sampled Gaussians, never below the truth.

Both directions of add/remove adjacency are covered by the first method that is exact for them: closed forms, the
contour integral, a loss distribution on a lattice. The Renyi bound at the best order and the same steps without
sampling are always valid, so the smallest of all bounds is taken.
"""

from __future__ import annotations

import math
from functools import lru_cache

from lightning_dp.accounting import contour, lattice
from lightning_dp.accounting.contour import Composed
from lightning_dp.accounting.gaussian import gaussian_delta, gaussian_epsilon, step_delta, step_epsilon
from lightning_dp.accounting.loss import SampledGaussianLoss

Phase = tuple[float, float, int]
"""Sampling rate, noise multiplier and number of updates."""

_SMALLEST_SIGMA = 0.02  # below, the lattice takes over from the contour
_ACCURATE = 3e-7  # relative error in epsilon that ends the search for a better bound


@lru_cache(maxsize=4096)
def epsilon(phases: tuple[Phase, ...], delta: float) -> float:
    """Smallest epsilon at ``delta`` in (0, 1); ``inf`` if a phase has no noise."""
    if any(sigma == 0 for _, sigma, _ in phases):
        return math.inf
    if _distance_bound(phases) <= delta:
        return 0.0
    if len(phases) == 1 and phases[0][2] == 1 and phases[0][0] < 1:
        return step_epsilon(*phases[0][:2], delta)
    ceiling = gaussian_epsilon(_mu(phases), delta)
    if all(q == 1 for q, _, _ in phases):
        return ceiling
    result = 0.0
    for removing in (True, False):
        result = max(result, _direction_epsilon(_composed(phases, removing), delta, result))
    return min(ceiling, result)


@lru_cache(maxsize=4096)
def delta(phases: tuple[Phase, ...], epsilon: float) -> float:
    """Smallest delta at a finite ``epsilon >= 0``; 1 if a phase has no noise."""
    if any(sigma == 0 for _, sigma, _ in phases):
        return 1.0
    if not phases:
        return 0.0
    if len(phases) == 1 and phases[0][2] == 1 and phases[0][0] < 1:
        return step_delta(*phases[0][:2], epsilon)
    ceiling = min(_distance_bound(phases), gaussian_delta(_mu(phases), epsilon))
    if all(q == 1 for q, _, _ in phases):
        return ceiling
    result = 0.0
    for removing in (True, False):
        result = max(result, _direction_delta(_composed(phases, removing), epsilon, result))
    return min(ceiling, result)


def _mu(phases: tuple[Phase, ...]) -> float:
    """Sensitivity over noise of the one Gaussian that the phases compose to when nothing is sampled."""
    return math.hypot(*(math.sqrt(count) / sigma for _, sigma, count in phases))


def _distance_bound(phases: tuple[Phase, ...]) -> float:
    """Total variation distance of the composition, at most the sum over its steps; bounds delta at every epsilon."""
    total = sum(count * q * math.erf(1 / sigma / math.sqrt(8)) for q, sigma, count in phases)
    return min(1.0, total * (1 + 1e-14))


def _composed(phases: tuple[Phase, ...], removing: bool) -> Composed:
    steps = tuple((SampledGaussianLoss(q, sigma, removing), count) for q, sigma, count in phases if q < 1)
    plain = tuple(phase for phase in phases if phase[0] == 1)
    return Composed(steps, _mu(plain) ** 2 / 2 if plain else 0.0)


def _direction_epsilon(composed: Composed, delta: float, known: float) -> float:
    """Upper bound of one direction's epsilon, or any value up to ``known`` if it is not larger."""
    best = composed.largest
    if best <= known:
        return known
    if _smooth(composed):
        finite = composed.without_tail(math.log(delta))
        log_delta = math.log(delta - finite.infinite)
        order = contour.order_for_delta(finite.cumulants, log_delta)
        best = min(best, contour.chernoff_epsilon(finite.cumulants, order, log_delta))
        if best <= known:
            return known
        value, error = contour.solve_epsilon(finite, order, log_delta)
        best = min(best, value)
        if error > _ACCURATE and composed.removes:
            best = min(best, lattice.epsilon(composed, delta, lattice.FEW_POINTS))
            value, error = contour.solve_rare_epsilon(finite, order, log_delta, best)
            best = min(best, value)
        if error <= _ACCURATE:
            return best
    return min(best, lattice.epsilon(composed, delta))


def _direction_delta(composed: Composed, epsilon: float, known: float) -> float:
    """Upper bound of one direction's delta, or any value up to ``known`` if it is not larger."""
    if epsilon >= composed.largest:
        return known
    best = 1.0
    if _smooth(composed):
        finite, order, log_best = _chernoff_delta(composed, epsilon)
        best = min(best, max(math.exp(min(log_best, 0.0)), math.ulp(0.0)) + finite.infinite)
        if best <= known:
            return known
        value, error = contour.solve_delta(finite, order, epsilon, log_best)
        best = min(best, value + finite.infinite)
        if error > _ACCURATE and composed.removes:
            best = min(best, lattice.delta(composed, epsilon, lattice.FEW_POINTS))
            value, error = contour.solve_rare_delta(finite, order, epsilon, math.log(best))
            best = min(best, value + finite.infinite)
        if error <= _ACCURATE:
            return best
    return min(best, lattice.delta(composed, epsilon))


def _chernoff_delta(composed: Composed, epsilon: float) -> tuple[Composed, float, float]:
    """The Renyi bound of delta, repeated while cutting off the tail that no longer matters lowers it."""
    log_best, finite = 0.0, composed
    for _ in range(4):
        order = contour.order_for_epsilon(finite.cumulants, epsilon)
        log_delta = contour.chernoff_log_delta(finite.cumulants, order, epsilon)
        if log_delta > log_best - 1 and finite is not composed:
            break
        log_best = min(log_delta, 0.0)
        finite = composed.without_tail(log_best - 10)
    return finite, order, log_best


def _smooth(composed: Composed) -> bool:
    """Whether the noise of every step is large enough for trapezoid sums."""
    return min(loss.sigma for loss, _ in composed.steps) >= _SMALLEST_SIGMA
