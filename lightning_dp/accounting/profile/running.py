"""Epsilon of a growing composition, read again and again.

What one step of each kind adds at the nodes of a line does not depend on how often it occurred. So the line of the
last reading is kept, and followed from step to step (:mod:`~lightning_dp.accounting.profile.track`). A line stays valid
whatever the counts are: what may be missing from its sum is bounded anew for them, and aliases only add. It is rebuilt
when they are no longer small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_dp.accounting.profile import bounds, contour
from lightning_dp.accounting.profile.closed_form import gaussian_epsilon
from lightning_dp.accounting.profile.composed import Composed
from lightning_dp.accounting.profile.cumulants import ladder_for_delta
from lightning_dp.accounting.profile.line import Line, solve
from lightning_dp.accounting.profile.losses import Floats, Loss
from lightning_dp.accounting.profile.track import HORIZON, Kinds, Track

_LARGEST_ERROR = 3e-7  # relative error of delta at which a line is rebuilt
_CHECKED_AGAIN = 1.01  # growth of the number of steps after which that is looked at anew
_ELEMENTS = 4_000_000  # nodes in t times nodes in x of a line that is worth keeping

Changes = Sequence[tuple[int, int]]  # mechanisms, and how many steps of each were added since the last reading


class RunningEpsilon:
    """Readings of epsilon for a fixed list of mechanisms whose counts change.

    Args:
        directions: For each ordered pair of neighbours the losses of the mechanisms, ``directions x mechanisms``.
    """

    def __init__(self, directions: Sequence[Sequence[Loss]]) -> None:
        # Without sampling both directions are the same.
        self._directions = [_Direction(losses) for losses in dict.fromkeys(map(tuple, directions))]
        self._readings: dict[float, _Reading] = {}
        self.size = len(directions[0])

    def epsilon(self, counts: Sequence[int], delta: float) -> float:
        """Smallest epsilon at ``delta``, never below the true one.

        Args:
            counts: How often each mechanism occurred, at least once.
            delta: In (0, 1).
        """
        reading = self._readings.get(delta)
        if reading is None:
            reading = self._readings[delta] = _Reading(self._directions, delta)
        return reading.at(tuple(counts))


class _Reading:
    """The last reading at one delta, and what the next one starts from."""

    def __init__(self, directions: Sequence[_Direction], delta: float) -> None:
        self._followers = [_Follower(direction, delta) for direction in directions]
        self._counts: tuple[int, ...] = ()
        self._value = 0.0

    def at(self, counts: tuple[int, ...]) -> float:
        if counts != self._counts:
            before = self._counts or (0,) * len(counts)
            pairs = zip(counts, before, strict=True)
            changes = [(kind, new - old) for kind, (new, old) in enumerate(pairs) if new != old]
            value = 0.0
            for follower in self._followers:
                value = max(value, follower.epsilon(counts, changes, value))
            self._counts, self._value = counts, value
        return self._value


class _Direction:
    """The losses of one ordered pair of neighbours."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        self.losses = losses
        kinds = [Composed.of([(loss, 1)]) for loss in losses]
        self.order = [i for i, kind in enumerate(kinds) if kind.sampled] + [
            i for i, kind in enumerate(kinds) if kind.atomic
        ]
        self.rhos = [(i, kind.mu**2 / 2) for i, kind in enumerate(kinds) if kind.mu]

    def composed(self, counts: Sequence[int]) -> Composed:
        """The composition of so many steps of each mechanism."""
        return Composed.of((loss, n) for loss, n in zip(self.losses, counts, strict=True))


class _Follower:
    """Epsilon of one direction at one delta."""

    def __init__(self, direction: _Direction, delta: float) -> None:
        self._direction, self._delta = direction, delta
        self._kinds: Kinds | None = None
        self._track: Track | None = None
        self._last = 0.0
        self._checked = 0.0  # number of steps at which the line was last found to be accurate
        self._ceiling = math.inf  # bound of epsilon for as many more steps of each kind as there are in the allowance
        self._allowance: dict[int, int] = {}

    def epsilon(self, counts: Sequence[int], changes: Changes, known: float) -> float:
        """Smallest epsilon, or ``known`` if that is larger."""
        if self._stays_below(changes, known):
            return known
        value = self._followed(changes)
        if value is None:
            value = self._anew(counts, changes, known)
        if value is None:
            value = self._cold(counts, changes, known)
        return max(value, known)

    def _stays_below(self, changes: Changes, known: float) -> bool:
        """Whether the ceiling holds after the changes, and is low enough."""
        for kind, count in changes:
            left = self._allowance[kind] = self._allowance.get(kind, 0) - count
            if left < 0:
                self._ceiling = math.inf
        if self._ceiling > known:
            return False
        self._track = None  # it misses these changes
        return True

    def _followed(self, changes: Changes) -> float | None:
        """What the track says; None where it has come to its end."""
        track = self._track
        if track is None or not all(track.follow(kind, count) for kind, count in changes):
            self._track = None
            return None
        value = track.epsilon()
        if value is None:
            self._last, self._track = track.expected, None
        return value

    def _anew(self, counts: Sequence[int], changes: Changes, known: float) -> float | None:
        """What the kept line says; None where it is not accurate any more."""
        kinds = self._kinds
        if kinds is None:
            return None
        weights = np.array(counts, dtype=np.float64)
        if known > 0 and self._find_ceiling(kinds, weights, changes) <= known:
            return known
        found = Track.around(kinds, weights, self._delta, self._last)
        if found is None:
            finite = self._delta - float(weights @ kinds.infinite)
            if finite <= 0:
                return None
            line = self._line(kinds, weights)
            value = solve(line, math.log(finite), 0.0, 2 * max(self._last, known))
            if math.isinf(value):
                return None
        else:
            self._track, value = found
        steps = float(weights.sum())
        if not self._checked <= steps <= _CHECKED_AGAIN * self._checked:
            if not self._line(kinds, weights).is_accurate(value, _LARGEST_ERROR):
                self._track = None
                return None
            self._checked = steps
        self._last = value
        return value

    def _find_ceiling(self, kinds: Kinds, counts: Floats, changes: Changes) -> float:
        """A Renyi bound, mostly for the direction that is not the worst, for more steps of the kinds that grow."""
        self._allowance = {kind: HORIZON for kind, _ in changes}
        later = counts.copy()
        later[list(self._allowance)] += HORIZON
        order, rhos = self._direction.order, self._direction.rhos
        rho = sum(later[i] * rho for i, rho in rhos)
        finite = self._delta - float(later @ kinds.infinite)
        self._ceiling = kinds.sheet.renyi_epsilon(later[order], rho, math.log(finite)) if finite > 0 else math.inf
        return self._ceiling

    def _line(self, kinds: Kinds, counts: Floats) -> Line:
        order, rhos = self._direction.order, self._direction.rhos
        return kinds.sheet.line(counts[order], sum(counts[i] * rho for i, rho in rhos))

    def _cold(self, counts: Sequence[int], changes: Changes, known: float) -> float:
        """A reading from nothing, after which the line that suits the counts is kept."""
        composed = self._direction.composed(counts)
        self._kinds, self._checked = None, 0.0
        if known > 0 and self._cold_ceiling(counts, changes) <= known:
            return known
        if composed.is_plain:
            return gaussian_epsilon(composed.mu, self._delta)
        self._last = bounds.epsilon((composed,), self._delta).upper
        sheet = self._sheet(composed)
        if sheet is not None:
            self._kinds = Kinds(sheet, self._direction.order, self._direction.rhos)
        return self._last

    def _cold_ceiling(self, counts: Sequence[int], changes: Changes) -> float:
        """The same as :meth:`_find_ceiling` without a line; infinite where sums over nodes do not give it."""
        self._allowance = {kind: HORIZON for kind, _ in changes}
        parts = self._direction.composed([n + self._allowance.get(kind, 0) for kind, n in enumerate(counts)]).parts()
        self._ceiling = math.inf
        if parts.is_smooth and parts.infinite < self._delta:
            log_delta = math.log(self._delta - parts.infinite)
            try:
                with np.errstate(divide="raise", over="raise", invalid="raise"):
                    self._ceiling = ladder_for_delta(parts, log_delta).renyi_epsilon(log_delta)
            except ArithmeticError:
                pass
        return self._ceiling

    def _sheet(self, composed: Composed) -> contour.Sheet | None:
        """The line for the present counts, if there is one of few nodes."""
        parts = composed.parts()
        if (
            composed.is_one_step
            or not parts.is_smooth
            or not 0 < self._last < math.inf
            or parts.infinite >= self._delta
        ):
            return None
        log_delta = math.log(self._delta - parts.infinite)
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                return contour.sheet(parts, ladder_for_delta(parts, log_delta), self._last, log_delta, _ELEMENTS)
        except ArithmeticError:
            return None
