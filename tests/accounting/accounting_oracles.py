"""Slow, simple ways to the same numbers: high precision integration, direct summation, and dp_accounting."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant


def exact_log_delta(q, sigma, count, epsilon, removing, c, spacing, nodes, step=0.1):
    """Delta at ``epsilon`` to far more digits than a float holds, on the line through ``c``, without any cleverness."""
    with mp.workdps(50):
        low, high = -13 - c / sigma, 13 + (2 + c) / sigma
        x = [k * mp.mpf(step) for k in range(int(low / step), int(high / step) + 1)]
        q, sigma, epsilon = mp.mpf(q), mp.mpf(sigma), mp.mpf(epsilon)
        sign = 1 if removing else -1
        loss = [sign * mp.log1p(q * mp.expm1(v / sigma - 1 / (2 * sigma**2))) for v in x]
        order = 1 + c if removing else c
        power = [
            mp.exp(-v * v / 2 + order * value) * step / mp.sqrt(2 * mp.pi) for v, value in zip(x, loss, strict=True)
        ]
        turn = [mp.expj(spacing * value) for value in loss]
        total = mp.mpf(0)
        for k in range(nodes):
            z = mp.mpc(c, k * spacing)
            term = mp.exp(count * mp.log(mp.fsum(power)) - z * epsilon) / (z * (z + 1))
            total += term.real / (2 if k == 0 else 1)
            power = [a * b for a, b in zip(power, turn, strict=True)]
        return float(mp.log(total * spacing / mp.pi))


def exact_gaussian_delta(mu, epsilon):
    """Delta of the Gaussian mechanism, as an mpmath number (Balle and Wang, 2018, Theorem 8)."""
    with mp.workdps(50):
        mu, epsilon = mp.mpf(mu), mp.mpf(epsilon)
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def direct_log_delta(q, sigma, count, epsilon, c, spacing, nodes, step=0.01):
    """As :func:`exact_log_delta` when removing a record, in double precision, on a grid that resolves everything."""
    x = np.arange(-13, 13 + (2 + c) / sigma, step)
    loss = np.log1p(q * np.expm1(x / sigma - 1 / (2 * sigma**2)))
    power = np.exp(-(x**2) / 2 + (1 + c) * loss) * step / math.sqrt(2 * math.pi)
    norm = power.sum()
    total = 0.0
    for k in range(nodes):
        z = complex(c, k * spacing)
        characteristic = 1 + (power / norm * np.expm1(1j * k * spacing * loss)).sum()
        term = characteristic**count * np.exp(-1j * k * spacing * epsilon) / (z * (z + 1))
        total += term.real / (2 if k == 0 else 1)
    return count * math.log(norm) - c * epsilon + math.log(total * spacing / math.pi)


def pld_accountant(phases, spacing=1e-4):
    """Google's accountant with all phases composed."""
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=spacing)
    for q, sigma, count in phases:
        event = dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))
        accountant.compose(dp_event.SelfComposedDpEvent(event, count))
    return accountant


def brute_force_delta(q, sigma, count, epsilon, points=4001):
    """Delta of one or two steps by summing over a fine grid of outputs, both directions, the larger."""
    x = np.linspace(-10 * sigma, 1 + 10 * sigma, points)
    step = x[1] - x[0]
    without = np.exp(-(x**2) / (2 * sigma**2)) / math.sqrt(2 * math.pi) / sigma * step
    present = np.exp(-((x - 1) ** 2) / (2 * sigma**2)) / math.sqrt(2 * math.pi) / sigma * step
    with_record = (1 - q) * without + q * present
    if count == 2:
        without, with_record = np.outer(without, without), np.outer(with_record, with_record)
    removing = np.maximum(with_record - math.exp(epsilon) * without, 0).sum()
    return max(removing, np.maximum(without - math.exp(epsilon) * with_record, 0).sum())
