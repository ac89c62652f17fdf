"""Everything that can be read off a privacy profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize_scalar

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.profile import bounds
from lightning_dp.accounting.profile.closed_form import gaussian_delta
from lightning_dp.accounting.profile.composed import Composed
from lightning_dp.accounting.profile.interval import Interval
from lightning_dp.accounting.profile.losses import Floats
from lightning_dp.errors import IncomparableError, InvalidValueError

_GRID = 24  # first looks at a curve before its extremum is refined
_SMALLEST_DELTA = 1e-12  # where a trade-off curve ends


@dataclass(frozen=True)
class PrivacyProfile:
    """The smallest delta at every epsilon, for everything that was released, under one adjacency.

    Every reading is on the safe side: a pair of distributions that dominates all neighbours stands for each release
    (Zhu, Dong and Wang, 2022), domination survives composition, and each numerical error has a bound that is added.

    Attributes:
        directions: The ordered pairs of neighbours, each with its composed losses.
        adjacency: Which data sets are neighbours.
    """

    directions: tuple[Composed, ...]
    adjacency: Adjacency

    @overload
    def epsilon(self, delta: float) -> float: ...
    @overload
    def epsilon(self, delta: Floats) -> Floats: ...
    def epsilon(self, delta: float | Floats) -> float | Floats:
        """Smallest epsilon at ``delta`` in (0, 1), never below the true one; an array gives an array."""
        return _mapped(lambda value: self.epsilon_interval(value).upper, delta)

    @overload
    def delta(self, epsilon: float) -> float: ...
    @overload
    def delta(self, epsilon: Floats) -> Floats: ...
    def delta(self, epsilon: float | Floats) -> float | Floats:
        """Smallest delta at a finite ``epsilon >= 0``, never below the true one; an array gives an array."""
        return _mapped(lambda value: self.delta_interval(value).upper, epsilon)

    def epsilon_interval(self, delta: float) -> Interval:
        """An interval ``(lower, upper)`` that contains the exact epsilon of the dominating pairs at ``delta``."""
        return bounds.epsilon(self.directions, _validate.delta(delta))

    def delta_interval(self, epsilon: float) -> Interval:
        """An interval ``(lower, upper)`` that contains the exact delta of the dominating pairs at ``epsilon``."""
        return bounds.delta(self.directions, _validate.non_negative("epsilon", epsilon))

    @overload
    def false_negative(self, false_positive: float) -> float: ...
    @overload
    def false_negative(self, false_positive: Floats) -> Floats: ...
    def false_negative(self, false_positive: float | Floats) -> float | Floats:
        """The trade-off curve: what share of members the best membership test must miss.

        The test may be told everything but the one record, and accuses at most ``false_positive`` of the non-members.
        The curve is the envelope ``max(0, 1 - delta - e^eps a, e^-eps (1 - delta - a))`` over all epsilon (Dong, Roth
        and Su, 2022, Proposition 2.12). Any epsilon gives a valid point, so a rough search errs on the safe side.

        Args:
            false_positive: In [0, 1]; an array gives an array.

        Returns:
            A lower bound of the false negative rate.
        """
        return _mapped(self._false_negative, false_positive)

    @overload
    def true_positive_at(self, false_positive: float) -> float: ...
    @overload
    def true_positive_at(self, false_positive: Floats) -> Floats: ...
    def true_positive_at(self, false_positive: float | Floats) -> float | Floats:
        """Largest share of members that a membership test can find at this false positive rate, in [0, 1]."""
        return 1 - self.false_negative(false_positive)

    def advantage(self) -> float:
        """Largest difference of true and false positive rate of any membership test, which is ``delta(0)``."""
        return self.delta(0.0)

    def gaussian_mu(self, smallest_delta: float = 1e-10) -> float:
        """Smallest ``mu`` for which one Gaussian mechanism is at least as bad wherever delta matters.

        ``N(mu, 1)`` against ``N(0, 1)`` then has at least this profile's delta at every epsilon with
        ``delta(epsilon) >= smallest_delta``. Below, no Gaussian of useful size stands for a sampled one. The largest
        ``mu`` over epsilon is searched for numerically, on a grid and around its best point.

        Args:
            smallest_delta: In (0, 1).

        Returns:
            ``mu``, rounded up; ``inf`` if something was released without noise.
        """
        farthest = self.epsilon(_validate.delta(smallest_delta, "smallest_delta"))
        if not math.isfinite(farthest):
            return math.inf
        points = np.linspace(0.0, farthest, _GRID) if farthest > 0 else np.zeros(1)
        return -_least(lambda epsilon: -_mu_for(epsilon, self.delta(epsilon)), points) * (1 + 1e-6)

    @overload
    def rdp(self, orders: float) -> float: ...
    @overload
    def rdp(self, orders: Floats) -> Floats: ...
    def rdp(self, orders: float | Floats) -> float | Floats:
        """Renyi divergences, the larger of the directions (Mironov, 2017; Mironov, Talwar and Zhang, 2019).

        Args:
            orders: Greater than 1; an array gives an array.

        Returns:
            ``log E_Q[(dP/dQ)^order] / (order - 1)``, in nats; ``inf`` where the moment does not exist.
        """
        tilts = np.atleast_1d(np.asarray(orders, dtype=np.float64)) - 1
        if not (tilts > 0).all() or not np.isfinite(tilts).all():
            raise InvalidValueError(f"`orders` must be finite and greater than 1, got {orders!r}.")
        values = np.max([_renyi(composed, tilts.ravel()) for composed in self.directions], axis=0)
        return values.reshape(np.shape(orders)) if isinstance(orders, np.ndarray) else float(values[0])

    def __add__(self, other: PrivacyProfile) -> PrivacyProfile:
        if not isinstance(other, PrivacyProfile):
            return NotImplemented
        if other.adjacency != self.adjacency:
            raise IncomparableError(
                f"Profiles under {self.adjacency} and {other.adjacency} cannot be composed: their numbers mean"
                " different things. Read both mechanisms under one adjacency, with mechanism.profile(adjacency=...)."
            )
        pairs = zip(self.directions, other.directions, strict=True)
        return PrivacyProfile(tuple(one + another for one, another in pairs), self.adjacency)

    def _false_negative(self, false_positive: float) -> float:
        rate = _validate.fraction("false_positive", false_positive)
        points = np.linspace(0.0, min(self.epsilon(_SMALLEST_DELTA), 700.0), _GRID)

        def found_early(epsilon: float) -> float:
            return math.exp(epsilon) * rate + self.delta(epsilon) - 1

        def found_late(epsilon: float) -> float:
            return math.exp(-epsilon) * (rate + self.delta(epsilon) - 1)

        return max(0.0, -_least(found_early, points), -_least(found_late, points))


def _mapped(reading: Callable[[float], float], values: ArrayLike) -> float | Floats:
    if not isinstance(values, np.ndarray):
        return reading(values)  # type: ignore[arg-type]
    return np.array([reading(float(value)) for value in values.ravel()], dtype=np.float64).reshape(values.shape)


def _least(function: Callable[[float], float], points: Floats) -> float:
    """Smallest value of a function: on a grid, then between the neighbours of the best point."""
    values = [function(float(point)) for point in points]
    best = int(np.argmin(values))
    low, high = float(points[max(0, best - 1)]), float(points[min(len(points) - 1, best + 1)])
    if low == high:
        return values[best]
    refined = minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-7 * high})
    return min(values[best], float(refined.fun))


def _mu_for(epsilon: float, delta: float) -> float:
    """The ``mu`` at which a Gaussian has ``delta`` at ``epsilon``."""
    if delta <= 0:
        return 0.0
    high = 1.0
    while gaussian_delta(high, epsilon) < delta and high < 1e9:
        high *= 2
    return float(brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, 0.0, high, xtol=1e-300, rtol=1e-13))


def _renyi(composed: Composed, tilts: Floats) -> Floats:
    if math.isinf(composed.mu) or any(loss.infinite > 0 for loss, _ in composed.atomic):
        return np.full(len(tilts), math.inf)
    return np.array([_one_renyi(composed, float(tilt)) for tilt in tilts], dtype=np.float64)


def _one_renyi(composed: Composed, tilt: float) -> float:
    """Of order ``tilt + 1``; without sampling where the sums over outputs would take too many nodes."""
    parts = composed.parts()
    try:
        return float(parts.cumulants(np.array([tilt]))[0][0]) / tilt
    except ArithmeticError:
        unsampled = parts.unsampled_mu
        return math.inf if unsampled is None else (tilt + 1) * unsampled**2 / 2
