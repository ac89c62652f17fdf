"""What all releases share: checks of what goes in, and the entry in the ledger before anything comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dp import _validate
from lightning_dp.accounting import Ledger, Mechanism
from lightning_dp.errors import InvalidValueError
from lightning_dp.releases.secret_integers import SecretIntegers
from lightning_dp.sampling import insecure_key, secret_key

PURPOSE = "release"


def checked_ledger(ledger: Any) -> Ledger:
    """The ledger, if it is one."""
    if not isinstance(ledger, Ledger):
        raise InvalidValueError(
            f"`ledger` must be a Ledger, got {ledger!r}: every release is written down. Create one `Ledger()` for each"
            " data set, and pass it to all releases on it."
        )
    return ledger


def record(mechanism: Mechanism, ledger: Ledger, purpose: str, insecure_seed: int | None) -> SecretIntegers:
    """Writes the release down and hands out the randomness for it, fresh from the operating system."""
    key = secret_key() if insecure_seed is None else insecure_key(insecure_seed)
    if insecure_seed is not None:
        ledger.stamp(f"a {purpose} follows from insecure_seed={insecure_seed}")
    # PRIVACY: before anything is drawn, so that no failure on the way can leave a release that nobody counted.
    ledger.record(mechanism, purpose=purpose)
    return SecretIntegers(key)


def numbers(name: str, value: Any) -> npt.NDArray[Any]:
    """The value as an array of finite integers or floats. Errors never quote data."""
    array = as_array(name, value)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise InvalidValueError(
            f"`{name}` must hold integers or floats of at most 64 bits, got {array.dtype}. Convert it first."
        )
    if not np.isfinite(array).all():
        raise InvalidValueError(
            f"`{name}` must hold finite numbers, got NaN or infinity in it. Clip what each record contributes: its"
            " sensitivity is unbounded otherwise."
        )
    return array


def as_array(name: str, value: Any) -> npt.NDArray[Any]:
    """The value as an array with at least one element."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidValueError(f"`{name}` must be a number or a rectangular array of numbers.") from error
    if array.size == 0:
        raise InvalidValueError(f"`{name}` must hold at least one element, got an array of shape {array.shape}.")
    return array


def checked_seed(insecure_seed: int | None) -> int | None:
    """The seed, if it is one."""
    return _validate.optional(_validate.integer, "insecure_seed", insecure_seed, minimum=0)
