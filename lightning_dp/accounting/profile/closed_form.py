"""Closed-form privacy profiles: the Gaussian mechanism and one Poisson-sampled Gaussian step.

All bounds are rounded outwards, so that a profile is never reported below its true value; with ``sign=-1`` they are
rounded to the other side, and bound it from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr, ndtr

from lightning_dp.accounting.profile.losses import Floats, SampledGaussianLoss

_ROUNDING = 4e-15
_NEWTON_STEPS = 60
_SMALLEST = 1e-290  # rounding is relative for numbers above


def normal_cells(edges: Floats) -> Floats:
    """Standard normal probability between neighbouring edges, in relative precision on both sides of 0.

    Args:
        edges: Increasing, possibly infinite, ``(cells + 1,)``.
    """
    low, high = edges[:-1], edges[1:]
    return np.asarray(np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)), dtype=np.float64)


def gaussian_delta(mu: float, epsilon: float, sign: int = 1) -> float:
    """Profile of the pair N(mu, 1) against N(0, 1) (Balle and Wang, 2018, Theorem 8).

    Args:
        mu: Sensitivity over standard deviation, at least 0; ``inf`` is the mechanism without noise.
        epsilon: At least 0.
        sign: 1 for a value that is not too small, -1 for one that is not too large.
    """
    if mu == 0 or math.isinf(mu):
        return 0.0 if mu == 0 else 1.0
    return _gaussian_delta_and_slope(mu, epsilon, sign)[0]


def _gaussian_delta_and_slope(mu: float, epsilon: float, sign: int = 1) -> tuple[float, float]:
    """Delta, and the derivative of its logarithm with respect to epsilon.

    Written with the scaled complementary error function, so that values down to the smallest float keep their digits.
    """
    near, far = (epsilon / mu - mu / 2) / math.sqrt(2), (epsilon / mu + mu / 2) / math.sqrt(2)
    tail = float(erfcx(far))
    # PRIVACY: `near` is a difference of two numbers, whose rounding is relative to their sum. Both move by it.
    if near < 0:
        gauss = math.exp(-near * near)
        head, lost = math.erfc(near), gauss * tail
        delta = (head - lost) / 2 + sign * _ROUNDING * (head + far * gauss)
        return min(1.0, max(0.0, delta)), -lost / (head - lost)
    head = float(erfcx(near)) * (1 + sign * _ROUNDING)
    moved = 1 + sign * _ROUNDING * (1 + far + near * far)
    delta = math.exp(-near * near) * moved * (head - tail) / 2 + sign * _SMALLEST
    return min(1.0, max(0.0, delta)), -tail / (head - tail) if head > tail else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest ``epsilon >= 0`` whose :func:`gaussian_delta` is at most ``delta``.

    Newton's method from the zCDP bound ``mu**2 / 2 + mu * sqrt(2 * log(1 / delta))`` (Bun and Steinke, 2016,
    Proposition 1.3). Delta is a convolution of log-concave functions of epsilon and so log-concave itself: tangents of
    its logarithm lie above it, and all iterates above the answer.
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    epsilon = high = mu * (mu / 2 + math.sqrt(-2 * math.log(delta))) * (1 + _ROUNDING)
    if math.isinf(high):
        return math.inf
    for _ in range(_NEWTON_STEPS):
        value, slope = _gaussian_delta_and_slope(mu, epsilon)
        if value > delta:  # by rounding alone
            break
        high, epsilon = epsilon, epsilon - math.log(value / delta) / slope if slope else 0.0
        if not 0 < epsilon < high:
            return high
    else:
        return high
    return smallest(lambda epsilon: gaussian_delta(mu, epsilon), delta, high, epsilon)


def smallest(profile: Callable[[float], float], delta: float, high: float, low: float = 0.0) -> float:
    """Smallest epsilon in ``(low, high]`` at which a decreasing profile is at most ``delta``, from above.

    Args:
        profile: Delta at an epsilon, above ``delta`` at ``low``.
        delta: In (0, 1).
        high: Where the profile is at most ``delta``, or a bound that is valid by itself.
        low: Where to start.
    """
    log_delta = math.log(delta)

    def excess(epsilon: float) -> float:
        value = profile(epsilon)
        return math.log(value) - log_delta if value > 0 else -1e3

    if excess(high) < 0:
        root = float(brentq(excess, low, high, xtol=1e-300, rtol=1e-14, maxiter=500, disp=False))
        for step in (0.0, 1e-15, 1e-14, 1e-13, 1e-12):
            if profile(root * (1 + step)) <= delta:
                return root * (1 + step)
        low = root
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-14 * high:
            break
        low, high = (low, middle) if profile(middle) <= delta else (middle, high)
    return high


def step_delta(loss: SampledGaussianLoss, epsilon: float, sign: int = 1) -> float:
    """Exact profile of one Poisson-sampled Gaussian (Li, Qardaji and Su, 2012, generalised).

    Removing: ``(1-q)Q + qP - e^eps Q = q (P - e^eps' Q)`` with ``e^eps' = 1 + (e^eps - 1) / q``.
    Adding: ``Q - e^eps ((1-q)Q + qP) = (1 - (1-q) e^eps) (Q - P / r)`` with ``r = 1 + (e^-eps - 1) / q``.
    Replacing: outputs above the one whose loss is ``eps``; the loss increases with the output.

    Args:
        loss: The step.
        epsilon: At least 0.
        sign: As for :func:`gaussian_delta`.
    """
    q, mu = loss.sampling_rate, 1 / loss.sigma
    if loss.direction == "remove":
        return q * gaussian_delta(mu, _amplified(q, epsilon), sign)
    if loss.direction == "replace":
        return _replaced_delta(loss, epsilon, sign)
    if epsilon >= loss.largest:
        return 0.0
    excess = epsilon + math.log1p(-q)
    if excess >= -_ROUNDING * epsilon:  # delta is at most 1 - (1-q) e^eps
        return 2 * _ROUNDING * epsilon if sign > 0 else 0.0
    slack = 1 + sign * _ROUNDING * (1 + epsilon) / -excess
    ratio = min(1.0, -math.exp(-epsilon) * math.expm1(excess) / q * slack)
    if ratio <= 0:
        return 0.0
    return min(1.0, -math.expm1(excess) * gaussian_delta(mu, -math.log(ratio), sign) * slack)


def _replaced_delta(loss: SampledGaussianLoss, epsilon: float, sign: int) -> float:
    q, mu = loss.sampling_rate, 1 / loss.sigma
    x = float(replacing_output(loss, np.array([epsilon]))[0])
    present, absent = q * float(ndtr(mu - x)), (1 - q) * math.expm1(min(epsilon, 700.0)) * float(ndtr(-x))
    tail = float(log_ndtr(-x - mu))
    mirrored = q * math.exp(epsilon + tail) if epsilon < 700 else 0.0
    slack = _ROUNDING * (1 + epsilon + abs(tail)) * (present + absent + mirrored)
    return min(1.0, max(0.0, max(0.0, present - absent - mirrored) + sign * slack))


def replacing_output(loss: SampledGaussianLoss, values: Floats) -> Floats:
    """The outputs, in units of the noise, at which replacing a record has the given losses.

    With ``y = exp(x / sigma)``, ``a = 1 - q`` and ``b = q exp(-1 / (2 sigma^2))`` the loss is ``v`` where
    ``b (y - e^v / y) = a (e^v - 1)``, or ``sinh(x / sigma - v / 2) = a sinh(v / 2) / b``.

    Args:
        loss: The step.
        values: Losses, of any sign.
    """
    q, half = loss.sampling_rate, np.abs(values) / 2
    log_ratio = math.log1p(-q) - math.log(q) + 1 / (2 * loss.sigma**2)
    log_sinh = half + np.log(np.maximum(-np.expm1(-2 * half), 1e-300) / 2) + log_ratio
    inverse = np.where(log_sinh > 300, log_sinh + math.log(2), np.arcsinh(np.exp(np.minimum(log_sinh, 300))))
    return np.asarray(np.sign(values) * loss.sigma * (half + inverse), dtype=np.float64)


def _amplified(q: float, epsilon: float) -> float:
    """``log(1 + (e^epsilon - 1) / q)`` without overflow, for ``epsilon >= 0``."""
    if epsilon > 700:
        return epsilon - math.log(q)
    return math.log1p(math.expm1(epsilon) / q)


def step_epsilon(loss: SampledGaussianLoss, delta: float) -> float:
    """Smallest epsilon whose :func:`step_delta` is at most ``delta``; in closed form when removing a record."""
    q = loss.sampling_rate
    if delta >= q or step_delta(loss, 0.0) <= delta:
        return 0.0
    if loss.direction == "remove":
        inner = gaussian_epsilon(1 / loss.sigma, delta / q)
        if inner > 700:
            return inner + math.log(q) + math.log1p((1 / q - 1) * math.exp(-inner))
        return math.log1p(q * math.expm1(inner)) * (1 + _ROUNDING)
    return smallest(lambda epsilon: step_delta(loss, epsilon), delta, gaussian_epsilon(2 / loss.sigma, delta))
