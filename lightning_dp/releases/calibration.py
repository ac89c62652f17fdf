"""How much Gaussian noise an epsilon and a delta ask for."""

from __future__ import annotations

import math
from typing import Literal

from lightning_dp import _validate
from lightning_dp.accounting.profile.closed_form import gaussian_delta
from lightning_dp.errors import InvalidValueError

Calibration = Literal["analytic", "classic"]

_MARGIN = 1e-12  # covers the rounding here and in the accountant that reads the result


def gaussian_noise_multiplier(epsilon: float, delta: float, *, calibration: Calibration = "analytic") -> float:
    """Noise of one Gaussian release, as a multiple of its L2 sensitivity.

    Args:
        epsilon: Greater than 0; below 1 for ``"classic"``.
        delta: In (0, 1).
        calibration: ``"analytic"``, the smallest noise there is, for every epsilon (Balle and Wang, 2018, Theorem 8);
            from above, and within 1e-9 of it where it is below 1e5. Or ``"classic"``, the older
            ``sqrt(2 * log(1.25 / delta)) / epsilon`` (Dwork and Roth, 2014, Theorem A.1), which is larger.

    Returns:
        Standard deviation of the noise over the sensitivity.

    Raises:
        InvalidValueError: An argument is out of range.

    Example:
        >>> round(gaussian_noise_multiplier(0.5, 1e-5, calibration="classic"), 4)
        9.6896
        >>> round(gaussian_noise_multiplier(0.5, 1e-5), 4)
        7.0318
    """
    epsilon, delta = _validate.positive("epsilon", epsilon), _validate.delta(delta)
    if calibration not in ("analytic", "classic"):
        raise InvalidValueError(f"`calibration` must be 'analytic' or 'classic', got {calibration!r}.")
    noise_multiplier = _analytic(epsilon, delta) if calibration == "analytic" else _classic(epsilon, delta)
    if not 0 < noise_multiplier < math.inf:
        raise InvalidValueError(f"`epsilon={epsilon:g}` with `delta={delta:g}` asks for noise that no float can hold.")
    return noise_multiplier


def _classic(epsilon: float, delta: float) -> float:
    # PRIVACY: the proof of the theorem uses epsilon < 1, and above its noise becomes too small.
    if epsilon >= 1:
        raise InvalidValueError(
            f"`epsilon` must be below 1 for calibration='classic', got {epsilon:g}: the theorem behind it assumes so."
            " Use calibration='analytic', which holds for every epsilon and needs less noise."
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon * (1 + _MARGIN)


def _analytic(epsilon: float, delta: float) -> float:
    """Bisection on the exact profile, between bounds that are valid by themselves; the upper end is what is returned.

    Above: total variation, ``mu / sqrt(2 * pi) <= delta``, or zCDP at ``rho = mu**2 / 2`` with the conversion
    ``epsilon = rho + 2 * sqrt(rho * log(1 / delta))`` (Bun and Steinke, 2016), whichever is smaller.
    """
    log_delta = -math.log(delta)
    zcdp = (math.sqrt(log_delta + epsilon) + math.sqrt(log_delta)) / epsilon / math.sqrt(2)
    high = min(zcdp, 1 / (delta * math.sqrt(2 * math.pi))) * (1 + _MARGIN)
    low = high / 2
    while gaussian_delta(1 / low, epsilon) <= delta:
        low, high = low / 2, low
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_delta(1 / middle, epsilon) <= delta else (middle, high)
    return high * (1 + _MARGIN)
