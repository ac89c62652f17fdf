"""The search for the setting that uses a budget up: few readings, all of them safe, none without end.

A run is compared with the Gaussian mechanism that has the same epsilon at the same delta. In the limit of many small
steps the two are the same (Dong, Roth and Su, 2022, Theorem 11), and the logarithm of that Gaussian's ``mu`` is a
straight line of slope 1 in the coordinates below. Far from the limit it is still smooth and increasing, so that secant
steps inside a bracket need a handful of readings. The limit only says where to look; what is returned has been read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.optimize import brentq

from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms import Composition, Mechanism
from lightning_dp.accounting.profile.closed_form import gaussian_delta

LANDING = 2e-5  # epsilon ends this close below its target, as a share of it
MOST_UPDATES = 10_000_000_000  # that are looked for
_READINGS = 200
_OVERSHOOT = 1.2  # of steps outside a bracket, so that it closes
_NARROWEST = 1e-9  # relative width of a bracket that floats can hardly split


@dataclass(frozen=True)
class Spent:
    """What was released before, and how the whole is read.

    Attributes:
        mechanism: The releases.
        adjacency: Which data sets are neighbours.
        rows_per_unit: Records that one unit owns.
    """

    mechanism: Mechanism
    adjacency: Adjacency
    rows_per_unit: int = 1

    def epsilon(self, run: Mechanism, delta: float) -> float:
        """Epsilon of everything with the run."""
        return self._together(run).epsilon(delta, adjacency=self.adjacency)

    def delta(self, run: Mechanism, epsilon: float) -> float:
        """Delta of everything with the run."""
        return self._together(run).delta(epsilon, adjacency=self.adjacency)

    @property
    def reach(self) -> float:
        """How far one unit moves a sum, in bounds of one record."""
        return self.rows_per_unit * (2.0 if self.adjacency == "replace_one" else 1.0)

    def _together(self, run: Mechanism) -> Mechanism:
        total = self.mechanism + run
        return total if self.rows_per_unit == 1 else total.group(self.rows_per_unit)


@dataclass(frozen=True)
class Budget:
    """What all releases together may cost, what was released before included.

    Attributes:
        epsilon: Greater than 0.
        delta: In (0, 1).
        spent: What was released before.
    """

    epsilon: float
    delta: float
    spent: Spent

    @property
    def spent_epsilon(self) -> float:
        """Epsilon of what was released before."""
        return self.spent.epsilon(Composition(), self.delta)


class Point(NamedTuple):
    """A setting that was read: its coordinate, its epsilon, and how far its ``log(mu)`` lies above the budget's."""

    value: float
    place: float
    epsilon: float
    gap: float


class Bracket(NamedTuple):
    """Neighbouring settings; ``None`` if every setting fits, or none."""

    fits: Point | None
    exceeds: Point | None


@dataclass(frozen=True)
class Knob:
    """A setting that costs more the larger its coordinate is.

    Attributes:
        run: The releases at a value of the setting.
        place: The coordinate of a value: the logarithm of the ``mu`` that the run tends to, up to a constant.
        value: The value at a coordinate.
        cheapest: First value of the range.
        dearest: Last value of the range.
        whole: Whether values are whole numbers; the answer is then exact.
    """

    run: Callable[[float], Mechanism]
    place: Callable[[float], float]
    value: Callable[[float], float]
    cheapest: float
    dearest: float
    whole: bool = False


def gaussian_mu(epsilon: float, delta: float) -> float:
    """About the ``mu`` at which a Gaussian has ``delta`` at ``epsilon``; from below by Bun and Steinke (2016)."""
    log_delta = math.log(delta)

    def excess(log_mu: float) -> float:
        return math.log(max(gaussian_delta(math.exp(log_mu), epsilon), 1e-320)) - log_delta

    root = math.sqrt(-2 * log_delta)
    low = math.log(max(2 * epsilon / (math.sqrt(root**2 + 2 * epsilon) + root), delta)) - 1e-9
    if excess(low) >= 0:
        return math.exp(low)
    high = low + 0.5
    while excess(high) < 0:
        low, high = high, high + 0.5
    return math.exp(float(brentq(excess, low, high, xtol=1e-12)))


class Meter:
    """Reads runs against a budget of which something is left."""

    def __init__(self, budget: Budget, spent_epsilon: float) -> None:
        self.budget, self.spent_epsilon = budget, spent_epsilon
        self._spent = gaussian_mu(spent_epsilon, budget.delta) if spent_epsilon > 0 else 0.0
        self.left = self._rest(gaussian_mu(budget.epsilon, budget.delta))
        """What the ``mu`` of the run may be if it is a Gaussian."""

    def read(self, run: Mechanism) -> tuple[float, float]:
        """Epsilon of everything with the run, and the gap; a gap above 0 exactly where the budget is exceeded."""
        budget = self.budget
        epsilon = self.epsilon(run)
        # PRIVACY: only this reading decides what fits; all else in this module chooses where to read.
        if epsilon > budget.epsilon:
            return epsilon, max(self._gap(epsilon, budget.delta), 1e-15)
        if epsilon > 0:
            return epsilon, min(self._gap(epsilon, budget.delta), 0.0)
        # Epsilon is 0 for every small enough cost, but delta still tells how small.
        delta = budget.spent.delta(run, budget.epsilon)
        return epsilon, min(self._gap(budget.epsilon, delta), 0.0)

    def epsilon(self, run: Mechanism) -> float:
        """Epsilon of everything with the run, never below the true one."""
        return self.budget.spent.epsilon(run, self.budget.delta)

    def _gap(self, epsilon: float, delta: float) -> float:
        if math.isinf(epsilon):
            return math.inf
        rest = self._rest(gaussian_mu(epsilon, delta)) if 0 < delta < 1 else 0.0
        return math.log(rest / self.left) if rest > 0 and self.left > 0 else -math.inf

    def _rest(self, mu: float) -> float:
        return math.sqrt(max(0.0, (mu - self._spent) * (mu + self._spent)))


def search(meter: Meter, knob: Knob, guess: float) -> Bracket:
    """The dearest setting that fits, to within the landing, and where known one that exceeds the budget.

    Args:
        meter: The budget.
        knob: The setting.
        guess: The value that is read first.

    Returns:
        Of whole numbers, neighbours; of others, a setting that fits whose epsilon is within :data:`LANDING` of the
        budget, unless no float gives one. At an end of the range, ``exceeds`` or ``fits`` is ``None``.
    """
    return _Search(meter, knob).from_guess(guess)


class _Search:
    """A bracket that shrinks around the boundary of the budget."""

    def __init__(self, meter: Meter, knob: Knob) -> None:
        self.meter, self.knob = meter, knob
        self.fits: Point | None = None
        self.exceeds: Point | None = None
        self.latest: list[Point] = []
        self.aim = 0.0 if knob.whole else -LANDING / 4

    def from_guess(self, guess: float) -> Bracket:
        self._read(guess)
        stride = 1.0
        while len(self.latest) < _READINGS and not self._done():
            if self.fits is None or self.exceeds is None:
                value, stride = self._outside(stride), 2 * stride
            else:
                value = self._inside(self.fits, self.exceeds)
            self._read(value)
        return Bracket(self.fits, self.exceeds)

    def _read(self, value: float) -> None:
        knob = self.knob
        epsilon, gap = self.meter.read(knob.run(value))
        point = Point(value, knob.place(value), epsilon, gap)
        self.latest.append(point)
        if gap > 0:
            self.exceeds = point
        else:
            self.fits = point

    def _done(self) -> bool:
        fits, exceeds, knob = self.fits, self.exceeds, self.knob
        if fits is not None and fits.value == knob.dearest:
            return True
        if exceeds is not None and exceeds.value == knob.cheapest:
            return True
        if knob.whole:
            return fits is not None and exceeds is not None and abs(exceeds.value - fits.value) <= 1
        if fits is not None and fits.epsilon >= self.meter.budget.epsilon * (1 - LANDING):
            return True
        return (
            fits is not None
            and exceeds is not None
            and exceeds.place - fits.place <= _NARROWEST * max(1.0, abs(fits.place))
        )

    def _outside(self, stride: float) -> float:
        """A value beyond all that were read, on the side where the boundary is."""
        point, knob = self.latest[-1], self.knob
        step = self.aim - point.gap if math.isfinite(point.gap) else math.copysign(stride, -point.gap)
        step *= 1.0 if len(self.latest) < 2 else _OVERSHOOT / self._slope()
        least = 1e-6 * stride**2
        step = min(step, -least) if point.gap > 0 else max(step, least)
        place = point.place + min(max(step, -4 * stride), 4 * stride)
        low, high = knob.place(knob.cheapest), knob.place(knob.dearest)
        if not low < place < high:
            return knob.cheapest if point.gap > 0 else knob.dearest
        value = knob.value(place)
        if knob.whole and value == point.value:
            value += math.copysign(1, knob.dearest - knob.cheapest) * (-1 if point.gap > 0 else 1)
        return value

    def _inside(self, fits: Point, exceeds: Point) -> float:
        """A value inside the bracket: an interpolated one, or the middle where interpolation does not help."""
        place = self._interpolated(fits, exceeds)
        value = self.knob.value((fits.place + exceeds.place) / 2 if place is None else place)
        if not self.knob.whole:
            return value
        first, last = sorted((fits.value, exceeds.value))
        return min(max(value, first + 1), last - 1)

    def _interpolated(self, fits: Point, exceeds: Point) -> float | None:
        """Where the curve through the newest points meets the aim; ``None`` if they do not tell, or stall."""
        if self._stalls():
            return None
        for points in (self.latest[-3:], self.latest[-2:], (fits, exceeds)):
            place = _crossing(points, self.aim)
            if place is not None and fits.place < place < exceeds.place:
                return place
        return None

    def _slope(self) -> float:
        """The slope through the two newest points, in a range around that of the limit."""
        before, newest = self.latest[-2:]
        rise, run = newest.gap - before.gap, newest.place - before.place
        return min(max(rise / run, 0.3), 2.0) if run and math.isfinite(rise) else 1.0

    def _stalls(self) -> bool:
        """Whether the last two readings together did not halve the distance to the boundary."""
        return len(self.latest) > 3 and 2 * abs(self.latest[-1].gap) > abs(self.latest[-3].gap)


def _crossing(points: Sequence[Point], aim: float) -> float | None:
    """Inverse interpolation: the place at which the gap is ``aim``, if the gaps are finite and increase with place."""
    ordered = sorted(points, key=lambda point: point.place)
    gaps = [point.gap for point in ordered]
    if len(points) < 2 or not all(map(math.isfinite, gaps)) or any(a >= b for a, b in itertools.pairwise(gaps)):
        return None
    return sum(
        one.place * math.prod((aim - other.gap) / (one.gap - other.gap) for other in ordered if other is not one)
        for one in ordered
    )
