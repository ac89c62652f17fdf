"""One step under a tilt: the weights for its characteristic function, and bounds of the modulus of that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr

from lightning_dp.accounting.profile.losses import Complexes, Floats
from lightning_dp.accounting.profile.sampled_gaussian import Step, log_normal, on_line

_SHIFT_RATIO = 2.5
_LEFT, _NORMAL = -5.0, 150.0  # Re z below which Phi(z) has a simple bound, (Re z)^2 - (Im z)^2 above which it is 1
_HITS_MARGIN = 0.1  # edges narrow the strip more; but at an eighth of the spacing the sums of moduli differ by 0.001


@dataclass(frozen=True, eq=False)
class TiltedStep:
    """The loss under the tilt ``exp(c * loss)``: weights at complex deviations from its mean, on a shifted line.

    Attributes:
        weights: Weights, of sum 1 for the whole loss, ``(nodes,)``.
        deviations: Loss minus mean, of non-negative imaginary part, ``(nodes,)``.
        size: Bound of the rounding error of the loss, averaged with the moduli of the weights.
    """

    weights: Complexes
    deviations: Complexes
    size: float


@lru_cache(maxsize=1024)
def tilted(step: Step, c: float, mean: float) -> TiltedStep:
    """The step under a tilt; only its hits if it is split."""
    shift = step.shift_for(c)
    nodes = step.nodes(c, shift)
    modulus = nodes.log_base + nodes.density + c * nodes.loss
    top = modulus.max()
    # PRIVACY: mass beyond the nodes would be missing from delta; the range is made so that there is none.
    if modulus[0] > top - step.whole.digits or modulus[-1] > top - step.digits:
        raise ArithmeticError(f"A tilt of {c} has mass beyond the nodes.")
    kept = modulus > top - step.depth
    weights = np.exp(modulus[kept] - top + 1j * (nodes.phase[kept] + c * nodes.turn[kept]))
    weights /= weights.sum()
    x, deviations, size = nodes.x[kept], nodes.loss[kept] - mean + 1j * nodes.turn[kept], nodes.size[kept]
    if step.is_split:
        weights = weights * ndtr((x + 1j * shift - step.split) / step.split_edge)
        above = np.abs(weights) > 1e-24 * np.abs(weights).max()
        weights, deviations, size = weights[above], deviations[above], size[above]
    return TiltedStep(weights, deviations, float(np.abs(weights) @ size))


def modulus_bounds(
    step: Step, tilts: tuple[float, float], cumulant: float, edges: Floats, hits: bool = False
) -> Floats:
    """Bounds of ``log |f(t')|`` under the tilt, for all ``t' >= t``, at each ``t`` of ``edges``.

    The modulus is at most the integral of the modulus along any line, where ``exp(-t Im L)`` damps. The line for each
    ``t`` is the one that is best for a Gaussian loss, or twice as far, which damps rare large losses too.

    Args:
        step: The step.
        tilts: The tilt ``c``, and the largest one whose nodes are at hand.
        cumulant: Logarithm of the tilted total.
        edges: Increasing, ``(t,)``.
        hits: Bound the part above the split only.
    """
    c, nodes = tilts[0], step.nodes(tilts[1])
    modulus = nodes.log_base + nodes.density + c * nodes.loss - cumulant
    kept = modulus > -step.depth
    weights, slope = np.exp(modulus[kept]), nodes.slope[kept]
    if hits:
        shifts = [np.full_like(edges, step.farthest_shift * _SHIFT_RATIO**-k) for k in range(6)]
    else:
        mean = float(weights @ slope)
        best = edges * mean / (1 + edges**2 * (float(weights @ slope**2) - mean**2))
        shifts = [np.minimum(shift, step.farthest_shift) for shift in (best, 2 * best)]
    far = np.concatenate(shifts)[:, None]
    density, _, loss, turn, _, _ = on_line(step.loss, nodes.x[kept], far)
    exponent = (
        far**2 / 2 + nodes.log_base[kept] + density + c * loss - np.tile(edges, len(shifts))[:, None] * turn - cumulant
    )
    if math.isfinite(step.cut):
        place = (step.cut - nodes.x[kept]) / step.edge
        exponent += log_normal(place - 1j * far / step.edge).real - log_ndtr(place)
    if hits:
        above = np.asarray((nodes.x[kept] - step.split + 1j * far) / step.split_edge, dtype=np.complex128)
        exponent += _normal_bound(above)
    # The modulus is analytic in a strip that is narrower by the shift.
    left = 1 - far[:, 0] / (0.95 * math.pi * step.loss.sigma)
    sums = np.exp(np.minimum(exponent, 700.0)).sum(axis=1) + 5 * np.exp(-step.digits * left)
    bounds = np.log(sums) + (_HITS_MARGIN if hits else 0.0)
    return np.asarray(bounds.reshape(len(shifts), -1).min(axis=0), dtype=np.float64)


def _normal_bound(z: Complexes) -> Floats:
    """Bound of ``log |Phi(z)|``, close to it.

    ``Phi(z) = phi(z) * integral of exp(z t - t^2 / 2)`` over positive ``t``, hence ``|Phi(z)| <= |phi(z)| / |Re z|`` on
    the left.
    """
    left = z.real < _LEFT
    real = np.where(left, z.real, _LEFT)
    tails = (z.imag**2 - real**2) / 2 - np.log(-real * math.sqrt(2 * math.pi))
    bounds = np.where(left, tails, 0.0)
    middle = ~left & (z.real**2 * np.sign(z.real) - z.imag**2 < _NORMAL)
    bounds[middle] = np.log(np.maximum(np.abs(ndtr(z[middle])), 1e-300))
    return bounds
