"""What is known about a number."""

from __future__ import annotations

import math
from typing import NamedTuple

_ACCURATE = 3e-7  # relative width below which nothing is gained by a better method
_CLOSE = 2e-3  # the same for a lattice, which takes a second


class Interval(NamedTuple):
    """Contains the exact value."""

    lower: float
    upper: float

    def and_also(self, other: Interval) -> Interval:
        """What both say."""
        return Interval(max(self.lower, other.lower), min(self.upper, other.upper))

    @property
    def is_accurate(self) -> bool:
        """Whether nothing is gained by a better method."""
        return math.isfinite(self.upper) and self.upper - self.lower <= _ACCURATE * self.upper

    @property
    def is_close(self) -> bool:
        """Whether nothing is gained by a lattice."""
        return math.isfinite(self.upper) and self.upper - self.lower <= _CLOSE * self.upper
