"""The privacy loss of one Poisson-sampled Gaussian step, exponentially tilted.

With ``x ~ N(0, 1)`` in units of the noise and ``L(x) = log(1 - q + q exp(x / sigma - 1 / (2 sigma^2)))`` the log
density ratio, both directions of add/remove adjacency follow from ``G(u) = log E[exp(u L)]``: removing a record has
the cumulant function ``G(1 + s)``, adding one has ``G(-s)``. The expectation is a trapezoid sum of a function that
is analytic for ``|Im x| < pi * sigma``, so it converges exponentially (Trefethen and Weideman, 2014, Theorem 5.1), and
the line of integration may be moved off the real axis. There ``exp(i t L)`` decays where it would oscillate, which
gives both few nodes at any ``t`` and bounds of the characteristic function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri_exp

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]

_CUT = 52.0  # nodes whose weight is below exp(-52) of the largest are negligible
_MARGIN = 10.5  # a unit Gaussian has fallen by exp(-55) there
_EDGE = 0.5  # width of the smooth edge of a cut
_MOST_NODES = 20_000


@dataclass(frozen=True)
class _Grid:
    """Trapezoid nodes on the line ``Im x = shift`` and what does not depend on the tilt, each ``(nodes,)``.

    Attributes:
        x: The nodes.
        base: Weights of the kept part of the standard normal distribution.
        log_base: Logarithm of their modulus.
        ratio: ``L(x)``.
        size: Bound of the rounding error of ``L(x)``, in units of the rounding unit.
    """

    x: Complexes
    base: Complexes
    log_base: Floats
    ratio: Complexes
    size: Floats


@lru_cache(maxsize=2048)
def _grid(q: float, sigma: float, cut: float, edge: float, low: int, high: int, step: float, shift: float) -> _Grid:
    nodes = step * np.arange(math.floor(low / step), math.ceil(high / step) + 1)
    x = (nodes + 1j * shift).astype(np.complex128)
    argument = x / sigma - 1 / (2 * sigma**2)
    kept = ndtr((cut - x) / edge) if math.isfinite(cut) else np.ones_like(x)
    base = np.exp(-(x**2) / 2) * kept * step / math.sqrt(2 * math.pi)
    log_modulus = np.log(np.maximum(np.abs(kept), 1e-300)) + (shift**2 - x.real**2) / 2
    ratio = _log_ratio(q, argument)
    posterior = np.exp(-np.logaddexp(0, math.log1p(-q) - math.log(q) - argument.real))
    return _Grid(
        x,
        base,
        log_modulus + math.log(step / math.sqrt(2 * math.pi)),
        ratio,
        np.abs(ratio) + posterior * np.abs(argument),
    )


@dataclass(frozen=True, eq=False)
class TiltedLoss:
    """One step's loss under the tilt ``exp(c * loss)``, as complex nodes and weights on a line ``Im x = shift``.

    Attributes:
        weights: Weights of the nodes, of sum 1, ``(nodes,)``.
        hits: The part of the weights above the split, ``(nodes,)``.
        deviations: Density ratio minus its mean, ``(nodes,)``; of positive imaginary part if the shift is positive.
        sign: 1 if the loss is the density ratio, -1 if it is its negative.
        rounding: Bound of the relative rounding error of ``exp(K(c + it))`` per unit of ``|c + it| + 1``.
    """

    weights: Complexes
    hits: Complexes
    deviations: Complexes
    sign: int
    rounding: float

    def log_characteristic(self, t: Floats) -> NDArray[np.complex128]:
        """The characteristic function ``f`` of loss minus mean under the tilt, and its part ``g`` above the split.

        Args:
            t: Arguments, ``(t,)``.

        Returns:
            ``log(f)`` and ``log(1 - g / f)``, both from all nodes and from every second one, ``(2, 2, t)``. The
            difference bounds the error of the first, since the sums converge exponentially.
        """
        damping = np.expm1(np.multiply.outer(-t, self.deviations.imag))
        half = np.multiply.outer(t / 2, self.deviations.real)
        sine, cosine = np.sin(half), np.cos(half)
        damped = 2 * sine * (1 + damping)
        real, imaginary = damping - damped * sine, damped * cosine
        total = self.weights[::2].sum()
        results = []
        for part, unit in ((slice(None), 1.0), (slice(None, None, 2), total)):
            all_log = _log1p(*_product(real[:, part], imaginary[:, part], self.weights[part] / unit))
            hits = self.hits[part] / unit
            above = hits.sum() + _product_sum(real[:, part], imaginary[:, part], hits) if hits.any() else 0 * all_log
            share = -above * np.exp(-all_log)
            results.append((all_log, _log1p(share.real, share.imag)))
        values = np.array(results)
        return values if self.sign > 0 else np.conj(values)

    def modulus_bound(self, t: Floats, hits: bool = False) -> Floats:
        """Bounds of ``log |f(t')|``, or ``log |g(t')|``, for all ``t' >= t >= 0``: the modulus under the integral."""
        damped = np.exp(np.multiply.outer(-t, np.maximum(self.deviations.imag, 0.0)))
        weights = np.abs(self.hits if hits else self.weights)
        return np.asarray(np.log(np.maximum(damped @ weights, 1e-300)) + 1e-14, dtype=np.float64)


def _product_sum(real: Floats, imaginary: Floats, weights: Complexes) -> Complexes:
    parts = _product(real, imaginary, weights)
    return np.asarray(parts[0] + 1j * parts[1], dtype=np.complex128)


def _product(real: Floats, imaginary: Floats, weights: Complexes) -> tuple[Floats, Floats]:
    """Real and imaginary part of the sum of complex rows times complex weights."""
    return real @ weights.real - imaginary @ weights.imag, real @ weights.imag + imaginary @ weights.real


def _log1p(real: Floats, imaginary: Floats) -> Complexes:
    """``log(1 + z)`` with small relative error near 0 (numpy's complex log1p loses digits there)."""
    squared = 2 * real + real**2 + imaginary**2
    near = np.log1p(np.maximum(squared, -0.5)) / 2
    far = np.log(np.maximum(np.hypot(1 + real, imaginary), 1e-300))
    modulus = np.where(squared > -0.5, near, far)
    return np.asarray(modulus + 1j * np.arctan2(imaginary, 1 + real), dtype=np.complex128)


@dataclass(frozen=True)
class SampledGaussianLoss:
    """Privacy loss of one step, ``q < 1``.

    Args:
        sampling_rate: Probability of each record, in (0, 1).
        sigma: Noise over sensitivity.
        removing: Direction; the other one is adding a record.
        cut: Outputs far above this ``x`` count as infinite loss, with a smooth edge. Without rare huge losses a tilt
            can be strong enough for the bulk of the distribution.
        edge: Width of the edge of the cut.
        split: Outputs above this ``x`` are hits, again with a smooth edge.
        split_edge: Width of that edge.
    """

    sampling_rate: float
    sigma: float
    removing: bool
    cut: float = math.inf
    edge: float = _EDGE
    split: float = math.inf
    split_edge: float = _EDGE

    @property
    def largest(self) -> float:
        """Largest possible loss."""
        return math.inf if self.removing else -math.log1p(-self.sampling_rate)

    @property
    def farthest_shift(self) -> float:
        """Largest useful distance of the line of integration from the real axis, half way to the singularity."""
        return min(1.0, math.pi * self.sigma / 2)

    @property
    def infinite(self) -> float:
        """Probability that is counted as infinite loss."""
        q, width = self.sampling_rate, math.hypot(1.0, self.edge)
        return float(q * ndtr((1 / self.sigma - self.cut) / width) + (1 - q) * ndtr(-self.cut / width))

    def without_tail(self, log_probability: float) -> SampledGaussianLoss:
        """The loss whose largest values, of the given probability, count as infinite (when removing a record)."""
        if not self.removing:
            return self
        near = -float(ndtri_exp(min(-1.0, log_probability - math.log(2 * self.sampling_rate))))
        far = -float(ndtri_exp(min(-1.0, log_probability - math.log(2))))
        return replace(self, cut=max(1 / self.sigma + near * math.hypot(1.0, _EDGE), far * math.hypot(1.0, _EDGE)))

    def split_at(self, loss: float) -> SampledGaussianLoss:
        """The same with outputs of more than this loss as hits."""
        argument = (
            math.log1p(math.expm1(loss) / self.sampling_rate) if loss < 700 else loss - math.log(self.sampling_rate)
        )
        posterior = -math.expm1(math.log1p(-self.sampling_rate) - loss)
        width = min(_EDGE, self.sigma * loss / posterior / 6)
        return replace(self, split=self.sigma * argument + 1 / (2 * self.sigma), split_edge=width)

    @property
    def bulk(self) -> SampledGaussianLoss:
        """The part below the split."""
        return replace(self, cut=self.split, edge=self.split_edge, split=math.inf)

    def cumulants(self, c: float) -> tuple[float, float, float]:
        """``K(c) = log E[exp(c * loss)]`` and its first two derivatives, the mean and variance under the tilt.

        Infinities stand for values that are too large to matter.
        """
        return _cumulants(self, c)

    def tilted(self, c: float, refinement: int, shift: float) -> TiltedLoss:
        """The loss under the tilt ``exp(c * loss)``; each refinement halves the distance of the nodes.

        Args:
            c: At least 0.
            refinement: Number of halvings.
            shift: Imaginary part of ``x``, in ``[0, pi * sigma)``.
        """
        return _tilted(self, c, refinement, shift)

    def order(self, c: float) -> float:
        """Order of the moment of the density ratio that belongs to the tilt."""
        return 1 + c if self.removing else -c

    def grid(self, c: float, refinement: int, shift: float) -> _Grid | None:
        """The nodes, or None where the tilt is so strong that they are too many."""
        if c > 1e15 or c > 1e15 * self.sigma**2:
            return None
        low, high = self._range(c)
        if high - low > _MOST_NODES * self._step(0):
            return None
        low, high = 8 * math.floor(low / 8), 8 * math.ceil(high / 8)
        return _grid(self.sampling_rate, self.sigma, self.cut, self.edge, low, high, self._step(refinement), shift)

    def _step(self, refinement: int) -> float:
        return min(0.39, 0.3 * self.sigma, self.edge, self.split_edge) / 2.0**refinement

    def _range(self, c: float) -> tuple[float, float]:
        """An interval outside which the tilted density and the density itself are negligible.

        Stationary points solve ``x = order * posterior(x) / sigma``. Iterating from above reaches the largest one
        for a positive order; for a negative order the density is log-concave and the point lies below 0.
        """
        if not self.removing:
            return self._lowest_mode(-c / self.sigma) - _MARGIN, _MARGIN
        shift = (1 + c) / self.sigma
        highest = min(shift, self.cut)
        for _ in range(60):
            previous, highest = highest, min(highest, shift * self._posterior(highest))
            if previous - highest < 0.1:
                break
        width = _MARGIN
        while self._log_density(highest + width, 1 + c) > max(0.0, self._log_density(highest, 1 + c)) - _CUT:
            width *= 1.3
        return -_MARGIN, min(highest + width, self.cut + _MARGIN * self.edge)

    def _lowest_mode(self, shift: float) -> float:
        low, high = shift * self._posterior(0.0), 0.0
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if middle < shift * self._posterior(middle) else (low, middle)
        return low

    def _logit(self, x: float) -> float:
        argument = x / self.sigma - 1 / (2 * self.sigma**2)
        return math.log(self.sampling_rate) - math.log1p(-self.sampling_rate) + argument

    def _posterior(self, x: float) -> float:
        """Probability that the record was sampled, given the output ``x``."""
        logit = self._logit(x)
        return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0

    def _log_density(self, x: float, order: float) -> float:
        logit = self._logit(x)
        softplus = max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))
        return -(x**2) / 2 + order * (math.log1p(-self.sampling_rate) + softplus)


def _log_ratio(q: float, argument: Complexes) -> Complexes:
    """``log(1 - q + q exp(argument))``, exact to rounding for tiny ``q`` and for large arguments."""
    grown = q * np.expm1(np.where(argument.real < 1, argument, 0.0))
    shrunk = (1 / q - 1) * np.exp(-np.where(argument.real < 1, 1.0, argument))
    small, large = _log1p(grown.real, grown.imag), _log1p(shrunk.real, shrunk.imag)
    return np.asarray(np.where(argument.real < 1, small, argument + math.log(q) + large), dtype=np.complex128)


@lru_cache(maxsize=2**14)
def _cumulants(loss: SampledGaussianLoss, c: float) -> tuple[float, float, float]:
    grid, order = loss.grid(c, 0, 0.0), loss.order(c)
    if grid is None:
        return math.inf, math.inf, math.inf
    ratio, base = grid.ratio.real, grid.base.real
    exponent = order * ratio
    log_weight = grid.log_base + exponent
    top = max(0.0, float(log_weight.max()))
    weights = np.exp(log_weight - top)
    small = exponent < 1
    excess = np.where(small, base * math.exp(-top) * np.expm1(np.minimum(exponent, 1)), weights - base * math.exp(-top))
    total = float(excess.sum()) - (float(ndtr(-loss.cut / math.hypot(1.0, loss.edge))) * math.exp(-top))
    value = math.log1p(total) if top == 0 else top + math.log(math.exp(-top) + total)
    weights /= weights.sum()
    mean = float(weights @ ratio)
    return value, mean if loss.removing else -mean, float(weights @ (ratio - mean) ** 2)


@lru_cache(maxsize=1024)
def _tilted(loss: SampledGaussianLoss, c: float, refinement: int, shift: float) -> TiltedLoss:
    grid, order, mean = loss.grid(c, refinement, shift), loss.order(c), loss.cumulants(c)[1]
    if grid is None:
        raise ValueError(f"The tilt {c} is too strong for a sum over nodes.")
    exponent = grid.log_base + order * grid.ratio.real
    kept = exponent > exponent.max() - _CUT
    phase = np.angle(grid.base[kept]) + order * grid.ratio.imag[kept]
    weights = np.exp(exponent[kept] - exponent.max() + 1j * phase)
    weights /= weights.sum()
    sign = 1 if loss.removing else -1
    size = float(np.abs(weights) @ grid.size[kept])
    hits = weights * ndtr((grid.x[kept] - loss.split) / loss.split_edge) if math.isfinite(loss.split) else 0 * weights
    return TiltedLoss(weights, hits, grid.ratio[kept] - sign * mean, sign, 2e-15 * size)
