"""Epsilon of a growing composition, read again and again.

What one step of each kind adds at the nodes of a line does not depend on how often it occurred. So the line of the
last reading is kept, and a reading after further steps costs one product of counts and rows and a few Newton steps.
A line stays valid whatever the counts are: what may be missing from its sum is bounded anew for them, and aliases only
add. It is rebuilt when they are no longer small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dp.accounting.profile import bounds, contour
from lightning_dp.accounting.profile.composed import Composed
from lightning_dp.accounting.profile.cumulants import ladder_for_delta
from lightning_dp.accounting.profile.line import solve
from lightning_dp.accounting.profile.losses import Loss

_LARGEST_ERROR = 3e-7  # relative error of delta at which a line is rebuilt
_CHECKED_AGAIN = 1.01  # growth of the number of steps after which that is looked at anew
_ELEMENTS = 4_000_000  # nodes in t times nodes in x of a line that is worth keeping


class RunningEpsilon:
    """Readings of epsilon for a fixed list of mechanisms whose counts change.

    Args:
        directions: For each ordered pair of neighbours the losses of the mechanisms, ``directions x mechanisms``.
    """

    def __init__(self, directions: Sequence[Sequence[Loss]]) -> None:
        self._directions = [_Direction(losses) for losses in directions]
        self._last: tuple[tuple[int, ...], float, float] = ((), 0.0, 0.0)
        self.size = len(directions[0])

    def epsilon(self, counts: Sequence[int], delta: float) -> float:
        """Smallest epsilon at ``delta``, never below the true one.

        Args:
            counts: How often each mechanism occurred, at least once.
            delta: In (0, 1).
        """
        if self._last[:2] != (counts, delta):
            result = 0.0
            for direction in self._directions:
                result = max(result, direction.epsilon(counts, delta, result))
            self._last = (tuple(counts), delta, result)
        return self._last[2]


@dataclass
class _Kept:
    """A line for one delta, and where the next epsilon is expected."""

    sheet: contour.Sheet
    epsilon: float
    growth: float = 0.0
    checked: float = 0.0  # number of steps at which the line was last found to be accurate


class _Direction:
    """One ordered pair of neighbours."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        self._losses = losses
        kinds = [Composed.of([(loss, 1)]) for loss in losses]
        self._order = [i for i, kind in enumerate(kinds) if kind.sampled] + [
            i for i, kind in enumerate(kinds) if kind.atomic
        ]
        self._rhos = [(i, kind.mu**2 / 2) for i, kind in enumerate(kinds) if kind.mu]
        self._kept: dict[float, _Kept] = {}

    def epsilon(self, counts: Sequence[int], delta: float, known: float) -> float:
        """Smallest epsilon, or ``known`` if that is larger."""
        kept = self._kept.get(delta)
        if kept is not None:
            value = self._read(kept, counts, delta, known)
            if value is not None:
                return value
        composed = Composed.of((loss, n) for loss, n in zip(self._losses, counts, strict=True))
        value = bounds.epsilon((composed,), delta).upper
        self._keep(composed, delta, value)
        return value

    def _read(self, kept: _Kept, counts: Sequence[int], delta: float, known: float) -> float | None:
        """What the kept line says; None where it is not accurate any more."""
        weights = np.array([counts[i] for i in self._order], dtype=np.float64)
        rho = sum(counts[i] * rho for i, rho in self._rhos)
        infinite = kept.sheet.infinite(weights)
        if infinite[1] >= delta:
            return None
        log_delta = math.log(delta - infinite[1])
        if known > 0 and kept.sheet.renyi_epsilon(weights, rho, log_delta) <= known:
            return known
        line = kept.sheet.line(weights, rho)
        if known > 0 and line.upper_log_delta(known) <= log_delta:
            return known
        value = solve(line, log_delta, known, 2 * kept.epsilon, kept.epsilon + kept.growth)
        if math.isinf(value):
            return None
        steps = float(weights.sum())
        if not kept.checked <= steps <= _CHECKED_AGAIN * kept.checked:
            if not line.is_accurate(value, _LARGEST_ERROR):
                return None
            kept.checked = steps
        kept.epsilon, kept.growth = value, value - kept.epsilon
        return value

    def _keep(self, composed: Composed, delta: float, epsilon: float) -> None:
        """Keeps the line that suits the present counts, where there is one of few nodes."""
        self._kept.pop(delta, None)
        parts = composed.parts()
        if (
            composed.is_plain
            or composed.is_one_step
            or not parts.is_smooth
            or not 0 < epsilon < math.inf
            or parts.infinite >= delta
        ):
            return
        log_delta = math.log(delta - parts.infinite)
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                sheet = contour.sheet(parts, ladder_for_delta(parts, log_delta), epsilon, log_delta, _ELEMENTS)
        except ArithmeticError:
            return
        if sheet is not None:
            self._kept[delta] = _Kept(sheet, epsilon)
