"""Which data sets count as neighbours.

Under ``add_remove`` one record is present or absent; under ``replace_one`` one record has another value; under
``zero_out`` one record is replaced by a null record that adds nothing. The numbers differ, so everything that reports
a number says which one it is for.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning_dp.errors import InvalidValueError

Adjacency = Literal["add_remove", "replace_one", "zero_out"]
Direction = Literal["remove", "add", "replace"]

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)


def checked(value: Any) -> Adjacency:
    """The value, if it is an adjacency."""
    if value not in ADJACENCIES:
        raise InvalidValueError(f"`adjacency` must be one of {', '.join(ADJACENCIES)}, got {value!r}.")
    return value  # type: ignore[no-any-return]


def directions(adjacency: Adjacency) -> tuple[Direction, ...]:
    """The ordered pairs of neighbours that have to be looked at; replacing is its own reverse."""
    return ("replace",) if adjacency == "replace_one" else ("remove", "add")
