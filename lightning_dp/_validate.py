"""Checks of plain values, shared by every constructor: one error that names the argument, its value and the remedy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from lightning_dp.errors import InvalidValueError

_T = TypeVar("_T")


def number(name: str, value: Any) -> float:
    """Returns ``value`` as a float, or raises if it is no real number (strings, booleans and NaN are none)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        hint = " Remove the quotes." if isinstance(value, str) else ""
        raise InvalidValueError(f"`{name}` must be a number, got {value!r} of type {type(value).__name__}.{hint}")
    result = float(value)
    if math.isnan(result):
        raise InvalidValueError(f"`{name}` must be a number, got NaN. Check the computation it comes from.")
    return result


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    result = number(name, value)
    if not 0 < result < math.inf:
        raise InvalidValueError(f"`{name}` must be finite and greater than 0, got {value!r}.")
    return result


def non_negative(name: str, value: Any) -> float:
    """A finite number of at least 0."""
    result = number(name, value)
    if not 0 <= result < math.inf:
        raise InvalidValueError(f"`{name}` must be finite and at least 0, got {value!r}.")
    return result


def probability(name: str, value: Any) -> float:
    """A number in (0, 1]."""
    result = number(name, value)
    if not 0 < result <= 1:
        raise InvalidValueError(f"`{name}` is a probability and must lie in (0, 1], got {value!r}.")
    return result


def fraction(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    result = number(name, value)
    if not 0 <= result <= 1:
        raise InvalidValueError(f"`{name}` is a share and must lie in [0, 1], got {value!r}.")
    return result


def delta(value: Any, name: str = "delta") -> float:
    """A number in (0, 1), the delta of a guarantee."""
    result = number(name, value)
    if not 0 < result < 1:
        raise InvalidValueError(
            f"`{name}` must lie strictly between 0 and 1, got {value!r}."
            " Choose it well below one over the number of records, for example 1e-5."
        )
    return result


def integer(name: str, value: Any, minimum: int) -> int:
    """A whole number of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidValueError(f"`{name}` must be a whole number, got {value!r} of type {type(value).__name__}.")
    if value < minimum:
        raise InvalidValueError(f"`{name}` must be at least {minimum}, got {value!r}.")
    return int(value)


def optional(check: Callable[..., _T], name: str, value: Any, **limits: Any) -> _T | None:
    """``None``, or what ``check`` makes of the value."""
    return None if value is None else check(name, value, **limits)


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that Python would take for one of them, such as the text ``"false"``."""
    if not isinstance(value, bool):
        raise InvalidValueError(f"`{name}` must be True or False, got {value!r} of type {type(value).__name__}.")
    return value


def choice(name: str, value: Any, choices: Sequence[_T]) -> _T:
    """Returns ``value`` if it is one of the ``choices``."""
    if value not in choices:
        raise InvalidValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return value  # type: ignore[no-any-return]


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A list of strings, and not one string, whose letters would be taken for its elements."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidValueError(f"`{name}` must be a list of strings, got {value!r}. Write [{value!r}].")
    result = tuple(value)
    for element in result:
        if not isinstance(element, (str, os.PathLike)):
            raise InvalidValueError(f"`{name}` must hold strings only, got {element!r} in it.")
    return tuple(map(os.fspath, result))


def string_map(name: str, value: Any) -> dict[str, str]:
    """A mapping from strings to strings."""
    if not isinstance(value, Mapping) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise InvalidValueError(f"`{name}` must be a mapping from strings to strings, got {value!r}.")
    return dict(value)


def delta_below_one_record(value: float, num_records: int) -> None:
    """Refuses a delta that would allow publishing one record in full."""
    if value * num_records >= 1:
        raise InvalidValueError(
            f"`delta={value:g}` is not below 1/N = 1/{num_records}: a mechanism that publishes one random record in"
            f" full would pass. Choose it well below, for example {0.1 / num_records:.0e}."
        )
