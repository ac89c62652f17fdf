"""The characteristic function of one step's loss under a tilt, at equidistant nodes."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from lightning_dp.accounting.profile.cumulants import Part
from lightning_dp.accounting.profile.losses import AtomicLoss, Complexes, Floats
from lightning_dp.accounting.profile.tilted import tilted

_STAGES = 16  # parts of a line in which negligible outputs are left out anew
_NEGLIGIBLE = 60.0  # in the logarithm


@lru_cache(maxsize=512)
def log_characteristic(
    part: Part, c: float, mean: float, spacing: float, count: int
) -> tuple[Complexes, Complexes | None, float]:
    """The characteristic function ``f`` of one step's loss minus its mean under the tilt.

    Returns:
        ``log f`` at ``count`` multiples of the spacing; with a split ``log(1 - g / f)``, where ``g`` is the part above
        it; and the rounding error of ``f`` per unit of ``|c + it|``, in units of the rounding unit.
    """
    if isinstance(part, AtomicLoss):
        exponent = c * part.losses
        weights = part.masses * np.exp(exponent - exponent.max())
        weights = weights / weights.sum()
        deviations = (part.losses - mean).astype(np.complex128)
        return _log1p(_turned_sums(weights, deviations, spacing, count)), None, float(weights @ np.abs(part.losses))
    whole = tilted(part.whole, c, mean)
    values = _log1p(_turned_sums(whole.weights, whole.deviations, spacing, count))
    if not part.is_split:
        return values, None, whole.size
    hits = tilted(part, c, mean)
    above = _damped_sums(hits.weights, hits.deviations, spacing, count)
    return values, _log1p(-above * np.exp(-values)), whole.size + hits.size


def _turned_sums(weights: Complexes, deviations: Complexes, spacing: float, count: int) -> Complexes:
    """``sum(w (exp(i t d) - 1))`` at all nodes, from the turns by few nodes and by multiples of so many."""
    small, large = _factors(deviations, spacing, count)
    sums = small @ (weights * (1 + large)).T + large @ weights
    return np.asarray(sums.T.reshape(-1)[:count], dtype=np.complex128)


def _damped_sums(weights: Complexes, deviations: Complexes, spacing: float, count: int) -> Complexes:
    """``sum(w exp(i t d))`` in the same way; what damping has made negligible is left out, more and more of it."""
    if not len(weights):
        return np.zeros(count, dtype=np.complex128)
    small, large = _factors(deviations, spacing, count)
    sums = np.zeros((len(large), len(small)), dtype=np.complex128)
    reach = np.log(np.maximum(np.abs(weights), 1e-300))
    for rows in np.array_split(np.arange(len(large)), _STAGES):
        if len(rows):
            left = reach - deviations.imag * (spacing * len(small) * rows[0])
            kept = left > left.max() - _NEGLIGIBLE
            sums[rows] = (weights[kept] * (1 + large[np.ix_(rows, kept)])) @ (1 + small[:, kept]).T
    return np.asarray(sums.reshape(-1)[:count], dtype=np.complex128)


def _factors(deviations: Complexes, spacing: float, count: int) -> tuple[Complexes, Complexes]:
    """Turns by the first few nodes, and by multiples of so many: their products are the turns by all nodes."""
    inner = math.isqrt(count - 1) + 1
    outer = -(-count // inner)
    small = _turns(deviations, np.arange(inner) * np.float64(spacing))
    return small, _turns(deviations, np.arange(outer) * np.float64(spacing * inner))


def _turns(deviations: Complexes, t: Floats) -> Complexes:
    """``exp(i t d) - 1`` with small relative error, ``(t, nodes)``."""
    damping = np.expm1(np.multiply.outer(-t, deviations.imag))
    half = np.multiply.outer(t / 2, deviations.real)
    sine = np.sin(half)
    damped = 2 * sine * (1 + damping)
    result = np.empty(half.shape, dtype=np.complex128)
    result.real = damping - damped * sine
    result.imag = damped * np.cos(half)
    return result


def _log1p(z: Complexes) -> Complexes:
    """``log(1 + z)`` with small relative error near 0 (numpy's complex log1p loses digits there)."""
    real, imaginary = z.real, z.imag
    squared = real * (2 + real) + imaginary**2
    modulus = np.log1p(np.maximum(squared, -0.5)) / 2
    if squared.min() < -0.5:
        modulus = np.where(squared > -0.5, modulus, np.log(np.maximum(np.hypot(1 + real, imaginary), 1e-300)))
    return np.asarray(modulus + 1j * np.arctan2(imaginary, 1 + real), dtype=np.complex128)
