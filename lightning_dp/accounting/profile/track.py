"""The sum over the nodes of one line, followed from update to update.

One more step of a kind multiplies each term by a fixed factor, and moves the epsilon that is looked for by about a
fixed amount. So the terms are kept turned to the epsilon that is expected, which each step moves along, and the sum at
the distance ``d`` from there is a polynomial in ``d``: with terms ``w`` at nodes ``t``,

    S(d) = Re sum(w exp(-i t d)) = sum over m < 4 of d^m / m! Re sum(w (-i t)^m) + R,    |R| <= d^4 / 24 sum(|w| t^4).

Epsilon is the solution of a scalar equation then. ``R`` is added like all other errors, each bounded for as many steps
as a track is followed: neither the terms nor what lies beyond the last node grows with the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_dp.accounting.profile.contour import Sheet, grown
from lightning_dp.accounting.profile.losses import Complexes, Floats

HORIZON = 64  # updates that a track is followed
_LARGEST_REST = 1e-11  # of the sum, that the polynomial may leave out
_LARGEST_EXCESS = 3e-7  # of the sum, that all bounds together may add
_CLOSE = 1e-13  # distance in log delta at which epsilon is found
_TURN = 2e-15  # bound of the rounding of a factor, for each unit of its exponent
_TRIES = 4  # expansions until one is close enough
_NEWTON_STEPS = 8


class Kinds:
    """What one step of each mechanism does to the sum on a line; the nodes are those of a sheet.

    Args:
        sheet: The line, with a row for every part.
        order: The mechanisms that are the sheet's rows, ``(parts,)``.
        rhos: ``mu^2 / 2`` of the plain Gaussian mechanisms.
    """

    def __init__(self, sheet: Sheet, order: Sequence[int], rhos: Sequence[tuple[int, float]]) -> None:
        size, nodes, edges = len(order) + len(rhos), len(sheet.t), len(sheet.edges)
        c, t = sheet.c, sheet.t
        self.sheet = sheet
        self.logs: Complexes = np.zeros((size, nodes), dtype=np.complex128)
        self.values, self.means, self.infinite = np.zeros(size), np.zeros(size), np.zeros(size)
        errors, tails = np.zeros((size, nodes)), np.zeros((size, edges))
        rows = list(order)
        self.logs[rows], errors[rows], tails[rows] = sheet.logs, sheet.errors, sheet.tails
        self.values[rows], self.means[rows] = sheet.values[:, sheet.index], sheet.means
        self.infinite[rows] = [part.infinite * (1 + 1e-12) for part in sheet.parts.parts]
        for row, rho in rhos:
            self.logs[row], tails[row] = -rho * t**2, -rho * sheet.edges**2
            self.values[row], self.means[row] = rho * c * (c + 1), rho * (2 * c + 1)
        self.errors, self.tails = errors, tails
        self.largest_error: Floats = errors.max(axis=0)
        self.turns: Floats = np.abs(self.logs).max(axis=0)
        ones = np.ones(nodes)
        self.moduli_powers: Floats = np.stack([ones, t, t**4 / 24])
        zero = np.zeros(nodes)
        derivatives = ((ones, zero), (zero, t), (-(t**2), zero), (zero, -(t**3)))  # of the real and imaginary parts
        self.powers: Floats = np.stack([np.stack(pair, axis=1).ravel() for pair in derivatives])


class Track:
    """The sum for one delta, ready to be solved for epsilon.

    Args:
        kinds: What steps do to it.
        counts: Steps of each kind so far, ``(kinds,)``.
        delta: Above the probability of an infinite loss.
        epsilon: About where epsilon is.
    """

    def __init__(self, kinds: Kinds, counts: Floats, delta: float, epsilon: float) -> None:
        sheet, self._kinds, self._delta = kinds.sheet, kinds, delta
        self._infinite = float(counts @ kinds.infinite)
        self.left = HORIZON  # steps that may still be followed
        mean = float(counts @ kinds.means)
        exponent = counts @ kinds.logs
        exponent.imag -= sheet.t * (epsilon - mean)
        self._terms: Complexes = np.exp(exponent) * sheet.kernel
        moduli = np.abs(self._terms)
        total, spread, self._fourth = (kinds.moduli_powers @ moduli).tolist()
        # PRIVACY: every error bound holds for all counts up to the horizon: moduli and tails only fall.
        relative = counts @ kinds.errors + HORIZON * kinds.largest_error + 1e-14
        relative += HORIZON * _TURN * (1 + kinds.turns)
        turn = HORIZON * _TURN * (float(np.abs(kinds.means).max()) + 1 / sheet.c)  # the drift is capped to that
        self._excess = float(np.exp(counts @ kinds.tails) @ sheet.tail_weights) + 1.01 * float(moduli @ grown(relative))
        self._excess += spread * (1.01 * turn + 4e-16 * (abs(epsilon) + abs(mean)))
        self._excess += 6e-16 * len(moduli) * total  # rounding of the moments
        self._scale, self._scale_moved = float(counts @ kinds.values), 0.0
        self._center, self._center_moved, self._distance = epsilon, 0.0, 0.0
        self._steps: dict[int, tuple[Complexes, float, float, float]] = {}
        self._moments = self._sums()

    @staticmethod
    def around(kinds: Kinds, counts: Floats, delta: float, start: float) -> tuple[Track, float] | None:
        """A track with the epsilon that it gives, found from ``start``; None if that is too far away."""
        for _ in range(_TRIES):
            track = Track(kinds, counts, delta, start)
            value = track.epsilon()
            if value is not None:
                return track, value
            start = track.expected
        return None

    @property
    def expected(self) -> float:
        """About where epsilon is now."""
        return self._center + (self._center_moved + self._distance)

    def follow(self, kind: int, count: int) -> bool:
        """Adds steps of one kind; False, and nothing is valid any more, if they are too many."""
        self.left -= count
        if not 0 < count <= HORIZON or self.left < 0:
            return False
        if kind not in self._steps:
            self._steps[kind] = self._step(kind)
        factor, scale, drift, infinite = self._steps[kind]
        for _ in range(count):
            self._terms *= factor
        self._scale_moved += count * scale
        self._center_moved += count * drift
        self._infinite += count * infinite
        self._moments = self._sums()
        return True

    def epsilon(self) -> float | None:
        """The epsilon whose upper bound is the delta, to within rounding; None if the bounds are too wide."""
        m0, m1, m2, m3 = self._moments
        c, excess, fourth, distance = self._kinds.sheet.c, self._excess, self._fourth, self._distance
        scale, center = self._scale + self._scale_moved, self._center + self._center_moved
        if self._infinite >= self._delta:
            return None
        close = _CLOSE + 1e-15 * (abs(scale) + c * abs(center))
        base = scale - c * center - math.log(self._delta - self._infinite)
        for _ in range(_NEWTON_STEPS):
            rest = fourth * (distance * distance) * (distance * distance) * (1 + 1e-9)
            total = m0 + distance * (m1 + distance * (m2 / 2 + distance * m3 / 6)) + excess + rest
            slope = m1 + distance * (m2 + distance * m3 / 2) - c * total
            if not total > 0 > slope:
                return None
            gap = base - c * distance + math.log(total)
            if -3 * close <= gap <= -close:
                self._distance = distance
                is_exact = rest <= _LARGEST_REST * total and excess <= _LARGEST_EXCESS * total
                return center + distance if is_exact else None
            distance -= (gap + 2 * close) * total / slope
        return None

    def _sums(self) -> list[float]:
        """``Re sum(w (-i t)^m)`` for ``m`` from 0 to 3."""
        sums: list[float] = (self._kinds.powers @ self._terms.view(np.float64)).tolist()
        return sums

    def _step(self, kind: int) -> tuple[Complexes, float, float, float]:
        """The factor of the terms for one step, and what it adds to ``K(c)``, to epsilon, and to infinite losses."""
        kinds = self._kinds
        t, c = kinds.sheet.t, kinds.sheet.c
        scale, mean = float(kinds.values[kind]), float(kinds.means[kind])
        exponent = kinds.logs[kind] + 1j * mean * t
        m0, m1 = self._moments[:2]
        rate = c - m1 / m0 if m0 > 0 else c
        drift = (scale + float((self._terms @ exponent).real) / m0) / rate if m0 > 0 < rate else 0.0
        drift = min(max(drift, -1 / c), 1 / c)
        exponent.imag -= t * drift
        return np.exp(exponent), scale, drift, float(kinds.infinite[kind])
