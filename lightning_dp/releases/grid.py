"""The grid on which numbers are released, so that the low bits of a result say nothing about the data.

Adding noise to a float leaks: which floats can come out depends on the value (Mironov, 2012; Haney, Desfontaines,
Hartman, Shrestha and Hay, 2022). Here values are rounded to multiples of a power of two that depends on public settings
only, and whole numbers of steps are added. What comes out is a multiple of the step, whatever went in.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dp.errors import InvalidValueError
from lightning_dp.releases.discrete_noise import MAX_SCALE, Integers

_FINENESS = 40  # at least 2**40 steps to the scale of the noise
_EXACT_FLOATS = 2**53
_FITS = 2.0**61  # a value and its noise together then fit into 64 bits
_LARGEST = Fraction(sys.float_info.max)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid of spacing ``2**exponent``.

    Attributes:
        exponent: Of the spacing.
        distance: How many steps apart two neighbours can lie after rounding, in the norm of the sensitivity.
        scale: Scale of the noise, in steps.
    """

    exponent: int
    distance: int
    scale: int

    @classmethod
    def of(cls, *, sensitivity: float, noise_multiplier: Fraction, rounding: int) -> Grid:
        """The grid for a noise of at least ``noise_multiplier`` times ``sensitivity`` after rounding.

        Args:
            sensitivity: How far one record moves the values before rounding.
            noise_multiplier: Scale of the noise over the sensitivity.
            rounding: How many steps rounding can add to the distance of two neighbours.

        Raises:
            InvalidValueError: The sensitivity is so small against the noise that rounding would exceed it.
        """
        wanted = noise_multiplier * Fraction(sensitivity)
        exponent = wanted.numerator.bit_length() - wanted.denominator.bit_length() - 1 - _FINENESS
        # PRIVACY: rounding moves neighbours apart. One more step pays for the shape of the discrete law, whose profile
        # lies above the continuous one by less than a shift of 1 / (4 * scale) steps for each number: that is
        # 2 * scale * log(cosh(1 / (2 * scale))), exactly, for Laplace, and by brute force less for the Gaussian.
        distance = int(Fraction(sensitivity) / Fraction(2) ** exponent) + rounding + 1
        scale = -int(-noise_multiplier * distance // 1)
        if scale > MAX_SCALE:
            raise InvalidValueError(
                f"The noise would be over 2**{int(noise_multiplier).bit_length() - 1} times the sensitivity, so wide"
                f" that a grid fine enough for {rounding} step(s) of rounding does not fit into 64 bits. Raise"
                " `epsilon`, or release fewer numbers at a time."
            )
        return cls(exponent=exponent, distance=distance, scale=scale)

    def steps(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Values, ``(numbers,)``, rounded to whole steps; int64 where they fit, Python integers where they do not."""
        floats = values.astype(np.float64)
        with np.errstate(over="ignore", under="ignore"):
            scaled = np.ldexp(floats, -self.exponent)
        exact = values.dtype.kind == "f" or bool(np.all(np.abs(floats) < _EXACT_FLOATS))
        if exact and np.all(np.abs(scaled) < _FITS):
            return np.rint(scaled).astype(np.int64)
        spacing = Fraction(2) ** self.exponent
        result = np.empty(len(values), dtype=object)
        result[:] = [round(Fraction(value) / spacing) for value in values.tolist()]
        return result

    def floats(self, steps: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The nearest float of each number of steps: a function of what is released, hence free of charge."""
        if steps.dtype != object:
            with np.errstate(over="ignore", under="ignore"):
                result = np.ldexp(steps.astype(np.float64), self.exponent)
            return np.clip(result, -sys.float_info.max, sys.float_info.max)
        spacing = Fraction(2) ** self.exponent
        return np.array([float(min(max(step * spacing, -_LARGEST), _LARGEST)) for step in steps], dtype=np.float64)

    def released(self, values: npt.NDArray[Any], noise: Integers) -> npt.NDArray[np.float64]:
        """Values plus noise on the grid, in the shape of the values."""
        steps = self.steps(values.reshape(-1))
        return self.floats(steps + noise.astype(steps.dtype)).reshape(values.shape)
