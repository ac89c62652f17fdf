"""Numbers released with Laplace or Gaussian noise."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dp import _validate
from lightning_dp.accounting import Gaussian, Ledger
from lightning_dp.accounting.mechanisms import Laplace
from lightning_dp.errors import InvalidValueError
from lightning_dp.releases.calibration import Calibration, gaussian_noise_multiplier
from lightning_dp.releases.discrete_noise import discrete_gaussian, discrete_laplace
from lightning_dp.releases.grid import Grid
from lightning_dp.releases.recording import PURPOSE, checked_ledger, checked_seed, numbers, record

Numbers = npt.NDArray[np.float64]


def laplace_mechanism(
    value: Any,
    *,
    sensitivity: float,
    epsilon: float,
    ledger: Ledger,
    purpose: str = PURPOSE,
    insecure_seed: int | None = None,
) -> float | Numbers:
    """Releases numbers with Laplace noise of scale ``sensitivity / epsilon`` (Dwork, McSherry, Nissim, Smith, 2006).

    The value is rounded to a grid with at least 2**40 steps to the scale of the noise, and a discrete Laplace integer
    is added exactly, so that no low bit of the result depends on the data (Mironov, 2012). The noise is larger than
    ``sensitivity / epsilon`` by what rounding can add to the sensitivity, so that the entry in the ledger is true.

    Args:
        value: A number, or an array of any shape; the shape is public.
        sensitivity: By how much one record, present or absent, can move ``value``: the largest sum of absolute
            differences over all its numbers (L1), in the unit of ``value``. For a sum, clip what a record contributes.
        epsilon: Of this release under ``add_remove``. In a ledger for ``replace_one`` the same release counts as two
            epsilon, since a replacement is a removal and an addition; if replacing a record moves your value by at most
            D, pass ``sensitivity = D / 2`` there.
        ledger: Where the release is written down, as ``Laplace(noise_multiplier=1 / epsilon)``, before it is made.
        purpose: What the ledger shall say it was for.
        insecure_seed: Make the noise repeatable, for tests. The ledger is stamped, and its guarantee void.

    Returns:
        A float for a number; for an array a float64 array of its shape. Multiples of a power of two.

    Raises:
        InvalidValueError: An argument is out of range; nothing was recorded then.

    Example:
        >>> from lightning_dp import Ledger
        >>> ledger = Ledger()
        >>> count = laplace_mechanism(1234, sensitivity=1, epsilon=0.5, ledger=ledger)
        >>> round(ledger.epsilon(delta=1e-9), 6)
        0.5
    """
    values, ledger = numbers("value", value), checked_ledger(ledger)
    sensitivity, epsilon = _validate.positive("sensitivity", sensitivity), _validate.positive("epsilon", epsilon)
    noise_multiplier = _reciprocal_above(epsilon)
    # PRIVACY: each rounded number can move one step further than the number did.
    grid = Grid.of(sensitivity=sensitivity, noise_multiplier=Fraction(noise_multiplier), rounding=values.size)
    source = record(Laplace(noise_multiplier), ledger, purpose, checked_seed(insecure_seed))
    return _plain(grid.released(values, discrete_laplace(source, grid.scale, values.size)))


def gaussian_mechanism(
    value: Any,
    *,
    sensitivity: float,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    calibration: Calibration = "analytic",
    ledger: Ledger,
    purpose: str = PURPOSE,
    insecure_seed: int | None = None,
) -> float | Numbers:
    """Releases numbers with Gaussian noise, calibrated to ``(epsilon, delta)`` or of a given multiplier.

    The value is rounded to a grid with at least 2**40 steps to the standard deviation, and a discrete Gaussian integer
    is added exactly (Canonne, Kamath and Steinke, 2020), as in :func:`laplace_mechanism`.

    Args:
        value: A number, or an array of any shape; the shape is public.
        sensitivity: By how much one record, present or absent, can move ``value``: the largest Euclidean distance over
            all its numbers together (L2), in the unit of ``value``.
        epsilon: Of this release under ``add_remove``, together with ``delta``. In a ledger for ``replace_one`` a record
            counts as twice the sensitivity; if replacing a record moves your value by at most D, pass
            ``sensitivity = D / 2`` there.
        delta: In (0, 1), well below one over the number of records.
        noise_multiplier: Instead of ``epsilon`` and ``delta``: standard deviation of the noise over ``sensitivity``.
        calibration: ``"analytic"`` or ``"classic"``, see :func:`gaussian_noise_multiplier`; has no effect on a given
            ``noise_multiplier``.
        ledger: Where the release is written down, as ``Gaussian(noise_multiplier)``, before it is made. It knows the
            epsilon at every delta, not only at the one asked for.
        purpose: What the ledger shall say it was for.
        insecure_seed: Make the noise repeatable, for tests. The ledger is stamped, and its guarantee void.

    Returns:
        A float for a number; for an array a float64 array of its shape. Multiples of a power of two.

    Raises:
        InvalidValueError: An argument is out of range; nothing was recorded then.

    Example:
        >>> from lightning_dp import Ledger
        >>> ledger = Ledger()
        >>> mean = gaussian_mechanism([0.5, 1.5], sensitivity=0.01, epsilon=2, delta=1e-6, ledger=ledger)
        >>> round(ledger.epsilon(delta=1e-6), 6)
        2.0
    """
    values, ledger = numbers("value", value), checked_ledger(ledger)
    sensitivity = _validate.positive("sensitivity", sensitivity)
    chosen = _chosen_multiplier(epsilon, delta, noise_multiplier, calibration)
    # PRIVACY: each rounded number can move one step further than the number did; in L2 that is a root of their number.
    rounding = math.isqrt(values.size - 1) + 1
    grid = Grid.of(sensitivity=sensitivity, noise_multiplier=Fraction(chosen), rounding=rounding)
    source = record(Gaussian(chosen), ledger, purpose, checked_seed(insecure_seed))
    return _plain(grid.released(values, discrete_gaussian(source, grid.scale, values.size)))


def _chosen_multiplier(
    epsilon: float | None, delta: float | None, noise_multiplier: float | None, calibration: Calibration
) -> float:
    if noise_multiplier is not None:
        if epsilon is not None or delta is not None:
            raise InvalidValueError(
                f"`noise_multiplier={noise_multiplier!r}` was given together with `epsilon={epsilon!r}` and"
                f" `delta={delta!r}`. Give either the noise or the guarantee; the other follows from it."
            )
        return _validate.positive("noise_multiplier", noise_multiplier)
    if epsilon is None or delta is None:
        raise InvalidValueError(
            f"Give `epsilon` and `delta`, or `noise_multiplier`; got epsilon={epsilon!r} and delta={delta!r}."
        )
    return gaussian_noise_multiplier(epsilon, delta, calibration=calibration)


def _reciprocal_above(epsilon: float) -> float:
    """The smallest float that is not below ``1 / epsilon``."""
    inverse = 1 / epsilon if epsilon > 1e-300 else math.inf
    if not 0 < inverse < math.inf:
        raise InvalidValueError(f"`epsilon={epsilon:g}` asks for noise that no float can hold.")
    return inverse if Fraction(inverse) * Fraction(epsilon) >= 1 else math.nextafter(inverse, math.inf)


def _plain(released: Numbers) -> float | Numbers:
    return float(released) if released.ndim == 0 else released
