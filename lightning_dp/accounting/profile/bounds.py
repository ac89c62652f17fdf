"""Bounds of epsilon and delta for any composition: ``[lower, upper]`` contains the exact value.

Each direction is covered by the first method that is exact for it: closed forms, the contour integral, the same
without rare huge losses, large losses counted exactly with a line each for hits and for the rest, a loss distribution
on a lattice. The Renyi bound at the best order is always valid, so no input is left without an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from lightning_dp.accounting.profile import characteristic, cumulants, sampled_gaussian, tilted
from lightning_dp.accounting.profile.atoms import atomic_delta, atomic_epsilon
from lightning_dp.accounting.profile.closed_form import (
    gaussian_delta,
    gaussian_epsilon,
    step_delta,
    step_epsilon,
)
from lightning_dp.accounting.profile.composed import Composed
from lightning_dp.accounting.profile.cumulants import Parts
from lightning_dp.accounting.profile.interval import Interval
from lightning_dp.accounting.profile.losses import AtomicLoss, SampledGaussianLoss
from lightning_dp.accounting.profile.methods import DELTA_METHODS, EPSILON_METHODS, Method

_NEGLIGIBLE = 1e-100  # a bound of delta that nobody needs smaller


@lru_cache(maxsize=4096)
def epsilon(directions: tuple[Composed, ...], delta: float) -> Interval:
    """Smallest epsilon at ``delta`` in (0, 1), for the worst of the directions."""
    result = Interval(0.0, 0.0)
    for composed in dict.fromkeys(directions):  # without sampling both directions are the same
        one = _direction_epsilon(composed, delta, result.upper)
        result = Interval(max(result.lower, 0.0 if composed.is_clamped else one.lower), max(result.upper, one.upper))
    return result


@lru_cache(maxsize=4096)
def delta(directions: tuple[Composed, ...], epsilon: float) -> Interval:
    """Smallest delta at a finite ``epsilon >= 0``, for the worst of the directions."""
    result = Interval(0.0, 0.0)
    for composed in dict.fromkeys(directions):
        one = _direction_delta(composed, epsilon, result.upper)
        result = Interval(max(result.lower, 0.0 if composed.is_clamped else one.lower), max(result.upper, one.upper))
    return result


def _direction_epsilon(composed: Composed, delta: float, known: float) -> Interval:
    """One direction; anything at most ``known`` is good enough."""
    if composed.distance <= delta:
        return Interval(0.0, 0.0)
    if composed.largest <= known:
        return Interval(0.0, composed.largest)
    if math.isinf(composed.mu):
        return Interval(math.inf, math.inf)
    if composed.is_plain:
        return _inverse(
            lambda at: _gaussian_delta(composed.mu, at),
            gaussian_epsilon(composed.mu, delta),
            delta,
        )
    if composed.is_one_step:
        step = composed.sampled[0][0]
        return _inverse(lambda at: _step_delta(step, at), step_epsilon(step, delta), delta)
    if composed.is_one_atomic:
        loss = composed.atomic[0][0]
        return _inverse(lambda at: _atomic_delta(loss, at), atomic_epsilon(loss, delta), delta)
    start = Interval(0.0, composed.largest)
    return _best(EPSILON_METHODS, composed.parts(), delta, start, known)


def _direction_delta(composed: Composed, epsilon: float, known: float) -> Interval:
    """One direction; anything at most ``known`` is good enough."""
    if math.isinf(composed.mu):
        return Interval(1.0, 1.0)
    ceiling = min(1.0, composed.distance)
    if epsilon >= composed.largest:
        return Interval(0.0, 0.0)
    if ceiling <= max(known, _NEGLIGIBLE):
        return Interval(0.0, ceiling)
    if composed.is_plain:
        return _gaussian_delta(composed.mu, epsilon)
    if composed.is_one_step:
        return _step_delta(composed.sampled[0][0], epsilon)
    if composed.is_one_atomic:
        return _atomic_delta(composed.atomic[0][0], epsilon)
    return _best(DELTA_METHODS, composed.parts(), epsilon, Interval(0.0, ceiling), max(known, _NEGLIGIBLE))


def _gaussian_delta(mu: float, epsilon: float) -> Interval:
    return Interval(gaussian_delta(mu, epsilon, sign=-1), gaussian_delta(mu, epsilon))


def _step_delta(step: SampledGaussianLoss, epsilon: float) -> Interval:
    """One sampled step; when replacing a record, both tails may cancel more than rounding bounds say."""
    exact = step.direction != "replace" or (epsilon < 700 and step.sigma < 100)
    return Interval(step_delta(step, epsilon, sign=-1) if exact else 0.0, step_delta(step, epsilon))


def _atomic_delta(loss: AtomicLoss, epsilon: float) -> Interval:
    """One discrete loss, rounded up: terms of one sign are added."""
    value = float(atomic_delta(loss, np.array([epsilon]))[0])
    return Interval(max(0.0, value * (1 - 1e-9)), value)


def _inverse(profile: Callable[[float], Interval], upper: float, delta: float) -> Interval:
    """The interval of an epsilon, the lower end a little below where delta is certainly not reached yet."""
    for share in (1e-9, 1e-7, 1e-4):
        lower = upper * (1 - share)
        if math.isfinite(upper) and profile(lower).lower >= delta:
            return Interval(lower, upper)
    return Interval(upper if math.isinf(upper) else 0.0, upper)


def _best(methods: tuple[Method, ...], parts: Parts, at: float, best: Interval, known: float) -> Interval:
    """What the methods say together, asked until they are accurate or their upper bound is at most ``known``."""
    for method in methods:
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                best = best.and_also(method(parts, at, best, known))
        except (ArithmeticError, ValueError):
            continue  # a method that leaves the range of floats gives no bound, rather than a wrong one
        if best.upper <= known or best.is_accurate:
            break
    return best


def clear_caches() -> None:
    """Forgets everything that was computed, to measure or to free memory."""
    for module in (characteristic, cumulants, sampled_gaussian, tilted):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    epsilon.cache_clear()
    delta.cache_clear()
