"""Closed-form privacy profiles: the Gaussian mechanism and one Poisson-sampled Gaussian step.

All bounds are rounded outwards, so that a profile is never reported below its true value.
"""

from __future__ import annotations

import math

from scipy.special import erfcx

_ROUNDING = 4e-15


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Profile of the pair N(mu, 1) against N(0, 1) (Balle and Wang, 2018, Theorem 8).

    Written with the scaled complementary error function, so that values down to the smallest float keep their digits.

    Args:
        mu: Sensitivity over standard deviation, at least 0; ``inf`` is the mechanism without noise.
        epsilon: At least 0.
    """
    if mu == 0 or math.isinf(mu):
        return 0.0 if mu == 0 else 1.0
    near, far = (epsilon / mu - mu / 2) / math.sqrt(2), (epsilon / mu + mu / 2) / math.sqrt(2)
    tail = float(erfcx(far))
    if near < 0:
        head = math.erfc(near)
        return min(1.0, (head - math.exp(-near * near) * tail) / 2 + _ROUNDING * head)
    head = float(erfcx(near)) * (1 + _ROUNDING)
    return min(1.0, math.exp(-near * near * (1 - _ROUNDING)) * (head - tail) / 2 + math.ulp(0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest ``epsilon >= 0`` whose :func:`gaussian_delta` is at most ``delta``.

    The search starts from the zCDP bound ``mu**2 / 2 + mu * sqrt(2 * log(1 / delta))`` (Bun and Steinke, 2016,
    Proposition 1.3), which is valid by itself.
    """
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    low, high = 0.0, mu * (mu / 2 + math.sqrt(-2 * math.log(delta))) * (1 + _ROUNDING)
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-14 * high:
            break
        low, high = (low, middle) if gaussian_delta(mu, middle) <= delta else (middle, high)
    return high


def step_delta(sampling_rate: float, sigma: float, epsilon: float) -> float:
    """Exact profile of one Poisson-sampled Gaussian, the larger direction (Li, Qardaji and Su, 2012, generalised).

    Removing: ``(1-q)Q + qP - e^eps Q = q (P - e^eps' Q)`` with ``e^eps' = 1 + (e^eps - 1) / q``.
    Adding: ``Q - e^eps ((1-q)Q + qP) = (1 - (1-q) e^eps) (Q - P / r)`` with ``r = 1 + (e^-eps - 1) / q``.
    """
    q, mu = sampling_rate, 1 / sigma
    removing = q * gaussian_delta(mu, _amplified(q, epsilon))
    ratio = 1 + math.expm1(-epsilon) / q
    if ratio <= 0:
        return removing
    adding = q * ratio * math.exp(epsilon) * gaussian_delta(mu, -math.log(ratio))
    return max(removing, min(1.0, adding * (1 + _ROUNDING)))


def _amplified(q: float, epsilon: float) -> float:
    """``log(1 + (e^epsilon - 1) / q)`` without overflow, for ``epsilon >= 0``."""
    if epsilon > 700:
        return epsilon - math.log(q)
    return math.log1p(math.expm1(epsilon) / q)


def step_epsilon(sampling_rate: float, sigma: float, delta: float) -> float:
    """Exact epsilon of one Poisson-sampled Gaussian; removing dominates (Zhu, Dong and Wang, 2022)."""
    if delta >= sampling_rate:
        return 0.0
    inner = gaussian_epsilon(1 / sigma, delta / sampling_rate)
    if inner > 700:
        return inner + math.log(sampling_rate) + math.log1p((1 / sampling_rate - 1) * math.exp(-inner))
    return math.log1p(sampling_rate * math.expm1(inner)) * (1 + _ROUNDING)
