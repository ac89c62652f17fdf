"""Delta at every epsilon from the nodes of one line, with bounds from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_dp.accounting.profile.losses import Complexes, Floats

_CLOSE = 1e-13  # distance in log delta at which epsilon is found


@dataclass(frozen=True, eq=False)
class Line:
    """Nodes and weights of the integral on one line, from which delta follows at every epsilon.

    Attributes:
        c: Real part of the line.
        log_scale: ``K(c)``.
        t: Nodes, from 0.
        terms: ``h / pi * exp(K(z) - K(c) - i t mean) / (z (z + 1))`` at the nodes, the first halved.
        mean: ``K'(c)``.
        excess: Sum of all error bounds, in the unit ``exp(K(c) - c * epsilon)``.
        period: Distance of the aliases.
        tilts: Where cumulants are known, for the bounds of aliases.
        values: The cumulants there.
        infinite: Bounds, from below and above, of the probability of an infinite loss.
    """

    c: float
    log_scale: float
    t: Floats
    terms: Complexes
    mean: float
    excess: float
    period: float
    tilts: Floats
    values: Floats
    infinite: tuple[float, float]

    def sum(self, epsilon: float) -> tuple[float, float]:
        """The trapezoid sum in the unit ``exp(K(c) - c * epsilon)``, and its derivative in that unit."""
        phase = self.t * (epsilon - self.mean)
        cosine, sine = np.cos(phase), np.sin(phase)
        real, imaginary = self._parts
        return float(real @ cosine + imaginary @ sine), float(self.t @ (imaginary * cosine - real * sine))

    def rounding(self, epsilon: float) -> float:
        """What rounding of the phase may add at ``epsilon``."""
        return 4e-16 * (abs(epsilon) + abs(self.mean)) * self._spread

    @cached_property
    def _spread(self) -> float:
        return float(np.abs(self.terms) @ self.t)

    @cached_property
    def _parts(self) -> tuple[Floats, Floats]:
        return self.terms.real.copy(), self.terms.imag.copy()

    def upper_log_delta(self, epsilon: float) -> float:
        """Logarithm of an upper bound of the finite part of delta."""
        total = max(0.0, self.sum(epsilon)[0]) + self.excess + self.rounding(epsilon)
        return min(0.0, self.log_scale - self.c * epsilon + math.log(total)) if total > 0 else -math.inf

    def lower_log_delta(self, epsilon: float) -> float:
        """Logarithm of a lower bound of the finite part of delta."""
        total = self.sum(epsilon)[0] - self.excess - self.rounding(epsilon) - self.aliases(epsilon)
        return self.log_scale - self.c * epsilon + math.log(total) if total > 0 else -math.inf

    def is_accurate(self, epsilon: float, error: float) -> bool:
        """Whether the sum is exact to this relative error."""
        doubt = self.excess + self.rounding(epsilon) + self.aliases(epsilon)
        return doubt <= error * max(self.sum(epsilon)[0], 0.0)

    def aliases(self, epsilon: float) -> float:
        """Bound of all aliases, in the unit ``exp(K(c) - c * epsilon)``.

        The one at distance ``m p`` is at most ``exp(K(d) - K(c) - (d - c) eps - m p |d - c|)`` by Markov's inequality,
        for any ``d > c`` above and any ``0 <= d < c`` below.
        """
        distance = np.abs(self.tilts - self.c)
        known = distance > 0
        exponent = (self.values - self.log_scale - (self.tilts - self.c) * epsilon - self.period * distance)[known]
        exponent -= np.log(-np.expm1(-self.period * distance[known]))
        above = self.tilts[known] > self.c
        return math.exp(min(700.0, float(exponent[above].min()))) + math.exp(min(700.0, float(exponent[~above].min())))


def solve(line: Line, log_delta: float, low: float, high: float, start: float | None = None) -> float:
    """Smallest epsilon in ``[low, high]`` whose upper bound is at most ``log_delta``; ``inf`` if not even ``high``."""
    position = line.mean - 1 / line.c - 1 / (line.c + 1) if start is None else start
    position = min(max(position, low), high)
    close = _CLOSE + 1e-15 * (abs(line.log_scale) + line.c * abs(position))
    for _ in range(60):
        total, slope = line.sum(position)
        total = max(total, 0.0) + line.excess + line.rounding(position)
        gap = line.log_scale - line.c * position + math.log(total) - log_delta if total > 0 else -math.inf
        if -2 * close <= gap <= 0:
            return position
        if gap > 0:
            low = position
        else:
            high = position
        rate = slope / total - line.c if total > 0 else -line.c
        following = position - (gap + close) / rate if rate < 0 else math.inf
        if not low < following < high:
            following = (low + high) / 2
        if following in (low, high):
            break
        position = following
    return high if line.upper_log_delta(high) <= log_delta else math.inf


def lower(line: Line, delta: float, upper: float) -> float:
    """A lower bound of epsilon, near the upper one where the line is exact."""
    low, high = line.infinite
    if delta <= low:
        return upper
    log_delta = math.log((delta - low) * (1 + 1e-15))
    total, slope = line.sum(upper)
    doubt = 2 * (line.excess + line.rounding(upper)) + line.aliases(upper)
    rate = line.c - slope / total if total > 0 else line.c
    step = (doubt / max(total, 1e-300) + (high - low) / delta) / max(rate, 1e-300) + 1e-15 * upper
    for _ in range(8):
        candidate = upper - step
        if candidate <= 0:
            break
        if line.lower_log_delta(candidate) >= log_delta:
            return candidate
        step *= 4
    return 0.0
