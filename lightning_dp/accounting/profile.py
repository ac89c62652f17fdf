"""Epsilon and delta of any composition of Poisson-sampled Gaussians, never below the truth.

Both directions of add/remove adjacency are covered by the first method that is exact for them: closed forms, the
contour integral, a loss distribution on a lattice. The Renyi bound at the best order and the same steps without
sampling are always valid, so the smallest of all bounds is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

from lightning_dp.accounting import contour, lattice
from lightning_dp.accounting.contour import Composed
from lightning_dp.accounting.gaussian import gaussian_delta, gaussian_epsilon, step_delta, step_epsilon
from lightning_dp.accounting.loss import SampledGaussianLoss

Phase = tuple[float, float, int]
"""Sampling rate, noise multiplier and number of updates."""

Bounds = Iterator[tuple[float, float]]

_LEAST_SIGMA, _MOST_SIGMA = 0.02, 1e6  # below, the lattice takes over; above, less noise is assumed
_LEAST_RATE, _MOST_RATE = 1e-12, 1 - 1e-9  # below, this rate is assumed; above, no sampling is assumed
_NEGLIGIBLE = 1e-100  # a bound of delta that nobody needs smaller
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
    if all(q > _MOST_RATE for q, _, _ in phases):
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
    if ceiling < _NEGLIGIBLE or all(q > _MOST_RATE for q, _, _ in phases):
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
    """One direction of the composition; rates and noise of absurd size are replaced by less private ones."""
    steps = tuple(
        (SampledGaussianLoss(max(q, _LEAST_RATE), min(sigma, _MOST_SIGMA), removing), count)
        for q, sigma, count in phases
        if q <= _MOST_RATE
    )
    plain = tuple(phase for phase in phases if phase[0] > _MOST_RATE)
    return Composed(steps, _mu(plain) ** 2 / 2 if plain else 0.0)


def _direction_epsilon(composed: Composed, delta: float, known: float) -> float:
    """Upper bound of one direction's epsilon, or ``known`` if that is larger."""
    if composed.largest <= known:
        return known
    sources = (_contour_epsilons(composed, delta), _lattice_epsilons(composed, delta))
    return max(known, _smallest(sources, composed.largest, known))


def _direction_delta(composed: Composed, epsilon: float, known: float) -> float:
    """Upper bound of one direction's delta, or ``known`` if that is larger."""
    if epsilon >= composed.largest:
        return known
    sources = (_contour_deltas(composed, epsilon), _lattice_deltas(composed, epsilon))
    return max(known, _smallest(sources, 1.0, known))


def _smallest(sources: Iterable[Bounds], best: float, known: float) -> float:
    """Smallest of the bounds, taken until one is accurate or at most ``known``."""
    for source in sources:
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                for bound, error in source:
                    best = bound if bound < best else best
                    if best <= known or error <= _ACCURATE:
                        return best
        except (ArithmeticError, ValueError):
            continue  # a method that leaves the range of floats gives no bound, rather than a wrong one
    return best


def _contour_epsilons(composed: Composed, delta: float) -> Bounds:
    """Bounds of epsilon with their relative errors, from cheap to expensive: Renyi, contour, contour of rare losses."""
    if not _smooth(composed):
        return
    finite = composed.without_tail(math.log(delta))
    log_delta = math.log(delta - finite.infinite)
    order = contour.order_for_delta(finite.cumulants, log_delta)
    ceiling = contour.chernoff_epsilon(finite.cumulants, order, log_delta)
    yield ceiling, math.inf
    yield contour.solve_epsilon(finite, order, log_delta)
    if composed.removes:
        rough = min(ceiling, lattice.epsilon(composed, delta, lattice.FEW_POINTS))
        yield rough, math.inf
        yield contour.solve_rare_epsilon(finite, order, log_delta, rough)


def _contour_deltas(composed: Composed, epsilon: float) -> Bounds:
    """The same for delta."""
    if not _smooth(composed):
        return
    finite, order, log_best = _chernoff_delta(composed, epsilon)
    ceiling = max(math.exp(min(log_best, 0.0)), math.ulp(0.0)) + finite.infinite
    yield ceiling, math.inf
    value, error = contour.solve_delta(finite, order, epsilon, log_best)
    yield value + finite.infinite, error
    if composed.removes:
        rough = min(ceiling, lattice.delta(composed, epsilon, lattice.FEW_POINTS))
        yield rough, math.inf
        value, error = contour.solve_rare_delta(finite, order, epsilon, math.log(rough))
        yield value + finite.infinite, error


def _lattice_epsilons(composed: Composed, delta: float) -> Bounds:
    yield lattice.epsilon(composed, delta), math.inf


def _lattice_deltas(composed: Composed, epsilon: float) -> Bounds:
    yield lattice.delta(composed, epsilon), math.inf


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
    return min(loss.sigma for loss, _ in composed.steps) >= _LEAST_SIGMA
