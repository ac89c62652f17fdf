"""The least noise that keeps a run within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from lightning_dp import _validate
from lightning_dp.accounting.mechanisms import Composition, Gaussian, Mechanism, PoissonSampled
from lightning_dp.errors import CalibrationError, InvalidValueError

_LOWEST, _HIGHEST = 2.0**-10, 2.0**20  # noise multipliers searched
_LANDING = 1e-6  # epsilon ends this close below its target
_ITERATIONS = 100


class _Point(NamedTuple):
    """A noise multiplier that was tried and the epsilon it gave."""

    log_sigma: float
    epsilon: float


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    num_updates: int,
    spent: Mechanism | None = None,
) -> float:
    """Smallest noise multiplier with which a run stays within ``(epsilon, delta)`` under add/remove adjacency.

    Args:
        epsilon: Target for everything together, finite and above 0.
        delta: In (0, 1).
        sampling_rate: Probability of each record to take part in an update, in (0, 1].
        num_updates: Noisy updates still to come, at least 1.
        spent: What was released about the same records before.

    Returns:
        Noise over sensitivity; the run's epsilon is at most the target and above 0.9999 of it.

    Raises:
        CalibrationError: If no noise multiplier reaches the target; the message gives the reachable range.

    Example:
        >>> sigma = calibrate_noise_multiplier(epsilon=3.0, delta=1e-5, sampling_rate=0.01, num_updates=1000)
        >>> round(sigma, 4)
        0.8136
    """
    target = _validate.positive("epsilon", epsilon)
    delta = _validate.delta(delta)
    rate = _validate.probability("sampling_rate", sampling_rate)
    updates = _validate.integer("num_updates", num_updates, 1)
    if spent is not None and not isinstance(spent, Mechanism):
        raise InvalidValueError(f"`spent` must be a mechanism or None, got {spent!r} of type {type(spent).__name__}.")
    before = spent if spent is not None else Composition()

    def achieved(log_sigma: float) -> float:
        return (before + updates * PoissonSampled(Gaussian(math.exp(log_sigma)), rate)).epsilon(delta)

    _check_spent(before, target, delta)
    return _search(achieved, target, delta)


def _check_spent(spent: Mechanism, target: float, delta: float) -> None:
    already = spent.epsilon(delta)
    if already >= target:
        raise CalibrationError(
            f"`epsilon={target}` at `delta={delta}` cannot be kept: what is already spent has epsilon {already:.6g}."
            f" Choose a target above {already:.6g}."
        )


def _search(achieved: Callable[[float], float], target: float, delta: float) -> float:
    """Secant steps on logarithms inside a bracket whose upper end always meets the target."""
    low, high = _bracket(achieved, target, delta)
    for turn in range(_ITERATIONS):
        if high.epsilon >= target * (1 - _LANDING) or high.log_sigma - low.log_sigma < 1e-13:
            break
        middle = _between(low, high, target) if turn % 4 < 3 else (low.log_sigma + high.log_sigma) / 2
        point = _Point(middle, achieved(middle))
        low, high = (low, point) if point.epsilon <= target else (point, high)
    return math.exp(high.log_sigma)


def _between(low: _Point, high: _Point, target: float) -> float:
    """Where the line through both points (logarithms of epsilon and of sigma) lies just below the target."""
    if high.epsilon <= 0 or math.isinf(low.epsilon):
        return (low.log_sigma + high.log_sigma) / 2
    aim = math.log(target) - _LANDING / 2
    share = (math.log(low.epsilon) - aim) / (math.log(low.epsilon) - math.log(high.epsilon))
    share = min(max(share, 1e-7), 1 - 1e-7)
    return low.log_sigma + share * (high.log_sigma - low.log_sigma)


def _bracket(achieved: Callable[[float], float], target: float, delta: float) -> tuple[_Point, _Point]:
    """Neighbouring points with epsilon above the target, and at most the target; strides grow."""
    point = _Point(0.0, achieved(0.0))
    stride = 0.25 if point.epsilon > target else -0.25
    while True:
        sigma = min(max(point.log_sigma + stride, math.log(_LOWEST)), math.log(_HIGHEST))
        if sigma == point.log_sigma:
            raise CalibrationError(_unreachable(point, target, delta))
        following = _Point(sigma, achieved(sigma))
        if (following.epsilon <= target) != (point.epsilon <= target):
            return (point, following) if stride > 0 else (following, point)
        point, stride = following, 2 * stride


def _unreachable(end: _Point, target: float, delta: float) -> str:
    relation, most = ("at least", "above") if end.epsilon > target else ("at most", "below")
    return (
        f"`epsilon={target}` at `delta={delta}` is out of reach: with noise multipliers from {_LOWEST:.3g} to"
        f" {_HIGHEST:.3g} the run has epsilon {relation} {end.epsilon:.6g}."
        f" Choose a target {most} {end.epsilon:.6g}, or other updates or sampling rate."
    )
