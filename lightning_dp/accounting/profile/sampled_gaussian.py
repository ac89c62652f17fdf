"""Sums over the output of one Poisson-sampled Gaussian step: its moments and its characteristic function.

With ``x ~ N(0, 1)`` in units of the noise and ``l(x) = log(1 - q + q exp(x / sigma - 1 / (2 sigma^2)))``, the density
of ``P`` over that of ``x`` is ``exp(D(x))`` and the loss is ``L(x)``, where ``(D, L)`` is ``(l, l)`` when removing a
record, ``(0, -l)`` when adding one, and ``(l, l(x) - l(-x))`` when replacing one. All expectations are integrals of
``phi(x) exp(D(x) + z L(x))``, analytic for ``|Im x| < pi sigma``, by the trapezoid rule.

The error of the rule with step ``h`` is at most ``(M_+ + M_-) / (exp(2 pi a / h) - 1)``, where ``M_+`` and ``M_-`` are
the integrals of the modulus along the lines at distance ``a`` on both sides (Trefethen and Weideman, 2014, Theorem
5.1). They follow from ``|l|``: with ``w`` the posterior probability that the record was sampled and ``b = a / sigma``,
``|exp l(x + ia)|^2 = exp(2 l(x)) (1 - 2 w (1 - w) (1 - cos b))``. So the step is chosen such that the error is below
``exp(-44)``, once and for all; no refinement is needed.

Where ``exp(i t L)`` would oscillate, the line of integration is moved off the real axis, to the side where it decays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri_exp, wofz

from lightning_dp.accounting.profile.closed_form import normal_cells
from lightning_dp.accounting.profile.losses import Complexes, Floats, SampledGaussianLoss

_DIGITS, _SPLIT_DIGITS = 44.0, 62.0  # -log of the error of a sum; hits may be far rarer than the rest
_CUT, _SPLIT_CUT = 50.0, 90.0  # nodes whose weight is below exp(-50) of the largest are negligible
_MARGIN = 10.5  # a unit Gaussian has fallen by exp(-55) there
_FAR_MARGIN = 16.0  # by exp(-128)
_STEEPEST = 8.0  # slope of a log density, per width of an edge, at which it still cuts
_EDGE = 0.5  # width of the smooth edge of a cut
_MOST_NODES = 60_000
_STRIPS = 10  # widths of the strip that are tried
_PLACES = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)  # above which outputs are told from the others
_FINE = 0.01  # spacing below which a better bound is looked for
_NARROW = 4.0  # ratio of spacings from which on the line of integration is nearer to the axis
_LARGEST = 340.0  # exponents are split there, so that squares stay in range
_LEAST_NORMAL = 150.0  # x^2 - y^2 from which Phi(x + iy) is 1 to within 1e-32


@dataclass(frozen=True)
class Step:
    """A sampled Gaussian step, possibly without its largest losses, possibly split into rare hits and the rest.

    Args:
        loss: The step.
        cut: Outputs far above this ``x`` count as infinite loss, with a smooth edge. Without rare huge losses a tilt
            can be strong enough for the bulk of the distribution.
        edge: Width of the edge of the cut.
        split: Outputs above this ``x`` are hits, again with a smooth edge.
        split_edge: Width of that edge.
    """

    loss: SampledGaussianLoss
    cut: float = math.inf
    edge: float = _EDGE
    split: float = math.inf
    split_edge: float = _EDGE

    @property
    def is_split(self) -> bool:
        """Whether hits are told from the rest."""
        return self.split != math.inf

    @property
    def digits(self) -> float:
        """Minus the logarithm of the error of sums over nodes that is aimed at."""
        return _SPLIT_DIGITS if self.is_split else _DIGITS

    @property
    def error(self) -> float:
        """Bound of the error of every sum over nodes, relative to the tilted total."""
        return 5 * math.exp(-self.digits)

    @property
    def depth(self) -> float:
        """Nodes whose weight is below ``exp(-depth)`` of the largest are negligible."""
        return _SPLIT_CUT if self.is_split else _CUT

    @property
    def infinite(self) -> float:
        """Probability that is counted as infinite loss."""
        if math.isinf(self.cut):
            return 0.0
        q, width = self.loss.sampling_rate, math.hypot(1.0, self.edge)
        return float(q * ndtr((1 / self.loss.sigma - self.cut) / width) + (1 - q) * ndtr(-self.cut / width))

    @property
    def cut_probabilities(self) -> tuple[float, float]:
        """Probability under ``Q`` that is cut, and by how much that under ``P`` is larger (when removing a record)."""
        width = math.hypot(1.0, self.edge)
        places = np.array([self.cut - 1 / self.loss.sigma, self.cut]) / width
        return float(ndtr(-places[1])), self.loss.sampling_rate * float(normal_cells(places)[0])

    def without_tail(self, log_probability: float, share: float = 1.0) -> Step:
        """The step whose largest losses, of the given probability, count as infinite (nothing when adding).

        Args:
            log_probability: Logarithm of the probability.
            share: Width of the edge over the usual one.
        """
        if self.loss.direction == "add":
            return self
        near = -float(ndtri_exp(min(-1.0, log_probability - math.log(2 * self.loss.sampling_rate))))
        far = -float(ndtri_exp(min(-1.0, log_probability - math.log(2))))
        width = math.hypot(1.0, share * _EDGE)
        return replace(self, cut=max(1 / self.loss.sigma + near * width, far * width), edge=share * _EDGE)

    def split_at(self, loss: float) -> Step:
        """The same with outputs of more than this loss as hits (when removing a record)."""
        return replace(self, split=self._output(loss), split_edge=self._width(loss))

    def cut_above(self, loss: float, distance: float, share: float) -> Step:
        """The same with a cut so many widths of its edge above this loss (when removing a record).

        Args:
            loss: Outputs of at most this loss are hardly ever cut.
            distance: Of the cut, in units of its edge.
            share: Width of the edge over that of a split there.
        """
        edge = share * self._width(loss)
        return replace(self, cut=self._output(loss) + distance * edge, edge=edge)

    def _output(self, loss: float) -> float:
        """The output with this loss, when removing a record."""
        q, sigma = self.loss.sampling_rate, self.loss.sigma
        argument = math.log1p(math.expm1(loss) / q) if loss < 700 else loss - math.log(q)
        return sigma * argument + 1 / (2 * sigma)

    def _width(self, loss: float) -> float:
        """Width of an edge at this loss, across which the loss changes by a sixth."""
        posterior = -math.expm1(math.log1p(-self.loss.sampling_rate) - loss)
        return min(_EDGE, self.loss.sigma * loss / posterior / 6)

    @property
    def bulk(self) -> Step:
        """The part below the split."""
        return replace(self, cut=self.split, edge=self.split_edge, split=math.inf)

    @property
    def whole(self) -> Step:
        """The step without its split."""
        return replace(self, split=math.inf) if self.is_split else self

    @property
    def farthest_shift(self) -> float:
        """Largest useful distance of the line of integration from the real axis."""
        edge = min(self.edge if math.isfinite(self.cut) else 1.0, self.split_edge if self.is_split else 1.0)
        return min(2.0, 0.45 * math.pi * self.loss.sigma, 3 * edge)  # the modulus of an edge grows like exp(s^2 / 2)

    def shift_for(self, c: float) -> float:
        """Distance of the line of integration under a tilt: nearer where strong tilts allow too narrow a strip only."""
        far, near = self.farthest_shift, min(self.farthest_shift, 0.25 * math.pi * self.loss.sigma)
        if self.loss.direction != "add" or self.spacing(c, far) >= _FINE:
            return far
        return near if self.spacing(c, far) < self.spacing(c, near) / _NARROW else far

    def spacing(self, c: float, shift: float) -> float:
        """Distance of nodes on ``Im x = shift`` whose sums are exact to :attr:`error` for all tilts up to ``c``.

        On the real axis (shift 0) that holds without oscillation, so that both sides of the strip may be wide.
        """
        power = 0.0 if self.loss.direction == "remove" else c
        return _spacing(self, power, shift)

    @property
    def _last(self) -> float:
        """The output beyond the cut at which everything ends: what an edge would keep there counts as cut.

        That is less than ``exp(-250)`` of what is cut, and no reading can tell. But then it does not matter how the
        density goes on rising beyond it under a strong tilt.
        """
        return self.cut + (_FAR_MARGIN + _STEEPEST) * self.edge

    def _check_cut(self, c: float) -> None:
        """Refuses tilts under which something is left at the end.

        ``u`` widths beyond the cut, what is kept falls like ``exp(s u - u^2 / 2)`` at least, ``s`` being the slope of
        the log density at the end. With ``s`` at most :data:`_STEEPEST`, it is ``exp(-128)`` of its largest value at
        the end. Between there and a line at a distance of eleven widths the modulus grows by ``exp(61)`` at most, so
        that sums may stop there like those of a function that has no more to come.
        """
        mirrored = c * self.posterior(-self.cut) if self.loss.direction == "replace" else 0.0
        slope = ((1 + c) * self.posterior(self._last) + mirrored) / self.loss.sigma - self.cut
        if slope * self.edge > _STEEPEST:
            raise ArithmeticError(f"A tilt of {c} sees past the edge of a cut.")

    def nodes(self, c: float, shift: float = 0.0) -> Nodes:
        """The nodes for tilts up to ``c`` on ``Im x = shift``.

        Raises:
            ArithmeticError: There would be too many.
        """
        return _nodes_for(self, c, shift)

    def range(self, c: float) -> tuple[float, float]:
        """An interval outside which the tilted density, for every tilt from 0 to ``c``, is negligible.

        The largest stationary point solves ``x = order * posterior(x) / sigma``; iterating from above reaches it.
        When adding a record the density is log-concave, with its mode below 0.
        """
        if self.loss.direction == "add":
            return self._lowest_mode(-c / self.loss.sigma) - _MARGIN, _MARGIN
        rest = c / self.loss.sigma * self.posterior(0.0) if self.loss.direction == "replace" else 0.0
        shift = (1 + c) / self.loss.sigma
        highest = min(shift + rest, self.cut)
        for _ in range(60):
            previous, highest = highest, min(highest, shift * self.posterior(highest) + rest)
            if previous - highest < 0.1:
                break
        width = _MARGIN
        while self._log_density(highest + width, 1 + c) > max(0.0, self._log_density(highest, 1 + c)) - self.depth:
            width *= 1.3
        if highest + width > self._last:
            self._check_cut(c)
        return -_MARGIN, min(highest + width, self._last)

    def _lowest_mode(self, shift: float) -> float:
        low, high = shift * self.posterior(0.0), 0.0
        while high - low > 0.5:
            middle = (low + high) / 2
            low, high = (middle, high) if middle < shift * self.posterior(middle) else (low, middle)
        return low

    @cached_property
    def _logit_at_0(self) -> float:
        q, sigma = self.loss.sampling_rate, self.loss.sigma
        return math.log(q) - math.log1p(-q) - 1 / (2 * sigma**2)

    def _logit(self, x: float) -> float:
        return self._logit_at_0 + x / self.loss.sigma

    def posterior(self, x: float) -> float:
        """Probability that the record was sampled, given the output ``x`` in units of the noise."""
        logit = self._logit(x)
        return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0

    def _log_density(self, x: float, order: float) -> float:
        logit = self._logit(x)
        softplus = max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))
        return -(x**2) / 2 + order * (math.log1p(-self.loss.sampling_rate) + softplus)


@lru_cache(maxsize=4096)
def _spacing(step: Step, negative_power: float, shift: float) -> float:
    """The widest spacing over several widths of the strip; off the real axis the strip reaches down to it."""
    spacing = _spacing_within(step, negative_power, shift, ())
    is_fine = spacing < _FINE and step.loss.direction == "add"
    return _spacing_within(step, negative_power, shift, _PLACES) if is_fine else spacing


def _spacing_within(step: Step, negative_power: float, shift: float, places: tuple[float, ...]) -> float:
    sigma, posterior = step.loss.sigma, min(0.5, step.posterior(_MARGIN))
    mixed = 2 * posterior * (1 - posterior)
    # |Phi(u + iv)| <= exp(v^2 / 2) (Phi(u) + v phi(u)), and phi(u) <= (1 + |u|) Phi(u), down to where weights end.
    farthest = 1 + _FAR_MARGIN + _STEEPEST
    edges = [(step.edge, farthest)] if math.isfinite(step.cut) else []
    if step.is_split:  # below the split the density rises like exp(x^2 / 2) towards the bulk
        edges.append((step.split_edge, farthest + abs(step.split) * step.split_edge))
    widest = min(0.95 * math.pi * sigma, 9.0)
    strips = _STRIPS if negative_power or edges else 1  # else the widest is best
    best = 0.0
    for width in [shift] if shift else [widest * 0.75**k for k in range(strips)]:
        reach = 2 * shift or width
        # The logarithm of the integral of the modulus at that distance from the real axis, over that on it.
        growth = reach**2 / 2
        if negative_power:
            growth += _growth_of_inverse(step, negative_power, reach / sigma, mixed, places)
        for edge, ratio in edges:
            growth += (reach / edge) ** 2 / 2 + math.log1p(ratio * reach / edge)
        found = 2 * math.pi * width / (step.digits + growth)
        if found < best and not places:
            break  # the growth is convex, so that there is one best width
        best = max(best, found)
    return best


def _growth_of_inverse(step: Step, power: float, angle: float, mixed: float, places: tuple[float, ...]) -> float:
    """Bound of the logarithm by which the integral of ``|exp l|^-power`` grows off the real axis.

    When adding a record, outputs above some ``x`` add at most ``Phi(-x) (1 - q)^-power`` at angles up to ``pi / 2``,
    where the real part of ``exp l`` is at least ``1 - q``; the integral on the axis is at least 1 (by Jensen).
    """
    turned = 1 - math.cos(min(angle, math.pi * (1 - 1e-9)))
    growth = -power / 2 * math.log1p(-mixed * turned)
    for x in places if angle <= math.pi / 2 else ():
        posterior = min(0.5, step.posterior(x))
        below = -power / 2 * math.log1p(-2 * posterior * (1 - posterior) * turned)
        above = float(log_ndtr(-x)) - power * math.log1p(-step.loss.sampling_rate)
        growth = min(growth, max(below, above) + math.log1p(math.exp(-abs(below - above))))
    return growth


def log_normal(z: npt.NDArray[np.complexfloating[Any, Any]]) -> Complexes:
    """``log Phi(z)``, also where ``Phi`` itself is too small for a float; below 1e-32 it is 0."""
    result = np.zeros(z.shape, dtype=np.complex128)
    some = (z.real < 0) | (z.real**2 - z.imag**2 < _LEAST_NORMAL)
    z = z[some]
    far = z.real < -5
    near = np.log(ndtr(np.where(far, 0.0, z)))
    away = np.where(far, z, -5.0)
    result[some] = np.where(far, np.log(wofz(-1j * away / math.sqrt(2)) / 2) - away**2 / 2, near)
    return result


@dataclass(frozen=True, eq=False)
class Nodes:
    """Nodes on a line ``Im x = +-shift``, each array ``(nodes,)``; the sign is the one with ``Im L >= 0``.

    Attributes:
        x: Real part of the nodes.
        log_base: Logarithm of the modulus of weight times ``phi``.
        density: Real part of ``D``.
        phase: Argument of weight times ``phi exp(D)``.
        loss: Real part of ``L``.
        turn: Imaginary part of ``L``.
        slope: Derivative of the imaginary part of ``L`` by the shift, at 0.
        size: Bound of the rounding error of ``L``, in units of the rounding unit.
        missing: Probability under ``N(0, 1)`` that the cut took away.
    """

    x: Floats
    log_base: Floats
    density: Floats
    phase: Floats
    loss: Floats
    turn: Floats
    slope: Floats
    size: Floats
    missing: float


@lru_cache(maxsize=2048)
def _nodes_for(step: Step, c: float, shift: float) -> Nodes:
    spacing = step.spacing(c, shift)
    low, high = step.range(c)
    if not (high - low) / spacing < _MOST_NODES:
        raise ArithmeticError(f"A tilt of {c} takes too many nodes.")
    return _nodes(step, spacing, math.floor(low / spacing), math.ceil(high / spacing), shift)


@lru_cache(maxsize=1024)
def _nodes(step: Step, spacing: float, low: int, high: int, shift: float) -> Nodes:
    x = spacing * np.arange(low, high + 1, dtype=np.float64)
    log_density, density_turn, loss, turn, slope, size = on_line(step.loss, x, shift)
    log_base = (shift**2 - x**2) / 2 + math.log(spacing / math.sqrt(2 * math.pi))
    phase = density_turn + (x * shift if step.loss.direction == "add" else -x * shift)
    missing = 0.0
    if math.isfinite(step.cut):
        log_kept = log_normal((step.cut - x - 1j * shift) / step.edge)
        log_base, phase = log_base + log_kept.real, phase + log_kept.imag
        missing = float(ndtr(-step.cut / math.hypot(1.0, step.edge)))
    return Nodes(x, log_base, log_density, phase, loss, turn, slope, size, missing)


def on_line(loss: SampledGaussianLoss, x: Floats, shift: float | Floats) -> tuple[Floats, ...]:
    """Real and imaginary part of ``D`` and of ``L``, the slope of the latter by the shift, and rounding sizes."""
    q, sigma, direction = loss.sampling_rate, loss.sigma, loss.direction
    argument = x / sigma - 1 / (2 * sigma**2)
    value, turn, posterior = _log_ratio(q, argument, shift / sigma)
    # With nearly every record sampled, ``1 - q`` loses digits in ``l``: by the rounding unit over ``exp(l)``.
    size = np.abs(value) + posterior * np.abs(argument) + q * np.exp(-value)
    if direction == "remove":
        return value, turn, value, turn, posterior / sigma, size
    if direction == "add":
        zero = np.zeros_like(value)
        return zero, zero, -value, turn, posterior / sigma, size
    mirrored = -x / sigma - 1 / (2 * sigma**2)
    other, other_turn, other_posterior = _log_ratio(q, mirrored, shift / sigma)
    other_size = np.abs(other) + other_posterior * np.abs(mirrored) + q * np.exp(-other)
    return value, turn, value - other, turn + other_turn, (posterior + other_posterior) / sigma, size + other_size


def _log_ratio(q: float, argument: Floats, angle: float | Floats) -> tuple[Floats, Floats, Floats]:
    """``log(1 - q + q exp(argument + i angle))``, exact to rounding for tiny ``q`` and for large arguments.

    Returns:
        Real and imaginary part, and the posterior ``q exp(argument) / (1 - q + q exp(argument))``.
    """
    near = np.minimum(argument, _LARGEST)
    growth = np.expm1(near)
    plain = np.log1p(q * growth)
    posterior = q * (growth + 1) * np.exp(-plain)
    if isinstance(angle, float) and angle == 0:
        return plain + (argument - near), np.zeros_like(argument), posterior
    real = q * (growth * np.cos(angle) - 2 * np.sin(angle / 2) ** 2)
    imaginary = q * (growth + 1) * np.sin(angle)
    squared = real * (2 + real) + imaginary**2
    value = np.log1p(np.maximum(squared, -0.5)) / 2
    if squared.min() < -0.5:
        value = np.where(squared < -0.5, np.log(np.maximum(np.hypot(1 + real, imaginary), 1e-300)), value)
    return value + (argument - near), np.arctan2(imaginary, 1 + real), posterior
