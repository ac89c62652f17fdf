"""Mechanisms as values: what was released about the data, how releases compose, and what they cost together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, overload

from lightning_dp import _validate
from lightning_dp.accounting import adjacency as adjacencies
from lightning_dp.accounting.adjacency import Adjacency, Direction
from lightning_dp.accounting.profile import Composed, Floats, Loss, PrivacyProfile
from lightning_dp.errors import InvalidValueError

_MOST = 2**53  # counts above are no longer exact as floats


def checked(name: str, value: Any, *, hint: str = "") -> Mechanism:
    """The value, if it is a mechanism.

    Args:
        name: The argument, for the message.
        value: What was passed.
        hint: What else to do, appended to the message.

    Raises:
        InvalidValueError: It is something else.
    """
    if not isinstance(value, Mechanism):
        raise InvalidValueError(
            f"`{name}` must be a mechanism, such as Gaussian(1.0), got {value!r} of type {type(value).__name__}.{hint}"
        )
    return value


class Mechanism(ABC):
    """A release with a privacy profile; ``a + b`` and ``n * a`` compose (adaptively, in any order)."""

    __array_ufunc__ = None  # lets `numpy_integer * mechanism` reach __rmul__

    @property
    @abstractmethod
    def phases(self) -> tuple[tuple[SingleMechanism, int], ...]:
        """Distinct single mechanisms with how often each was applied."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers, lists and dicts that :func:`mechanism_from_dict` turns back into an equal value."""

    @abstractmethod
    def group(self, size: int) -> Mechanism:
        """The same releases seen by a group of ``size`` records that come and go together.

        A mechanism whose epsilon at some delta is the answer for one record gives, through this, the answer for a
        unit that owns ``size`` records, such as all rows of one person.

        Args:
            size: Number of records, at least 1.
        """

    def profile(self, adjacency: Adjacency = "add_remove") -> PrivacyProfile:
        """Everything that can be said about the releases under one adjacency.

        Args:
            adjacency: ``"add_remove"``, ``"replace_one"`` or ``"zero_out"``.
        """
        adjacency = adjacencies.checked(adjacency)
        return PrivacyProfile(
            tuple(self._composed(adjacency, direction) for direction in adjacencies.directions(adjacency)), adjacency
        )

    @overload
    def epsilon(self, delta: float, *, adjacency: Adjacency = "add_remove") -> float: ...
    @overload
    def epsilon(self, delta: Floats, *, adjacency: Adjacency = "add_remove") -> Floats: ...
    def epsilon(self, delta: float | Floats, *, adjacency: Adjacency = "add_remove") -> float | Floats:
        """Smallest epsilon of the guarantee at ``delta``, never below the true one.

        Args:
            delta: In (0, 1); an array gives an array.
            adjacency: Which data sets are neighbours.

        Returns:
            Epsilon; ``inf`` if something was released without noise.
        """
        return self.profile(adjacency).epsilon(delta)

    @overload
    def delta(self, epsilon: float, *, adjacency: Adjacency = "add_remove") -> float: ...
    @overload
    def delta(self, epsilon: Floats, *, adjacency: Adjacency = "add_remove") -> Floats: ...
    def delta(self, epsilon: float | Floats, *, adjacency: Adjacency = "add_remove") -> float | Floats:
        """Smallest delta of the guarantee at ``epsilon``, never below the true one.

        Args:
            epsilon: Finite and at least 0; an array gives an array.
            adjacency: Which data sets are neighbours.

        Returns:
            Delta, in [0, 1].
        """
        return self.profile(adjacency).delta(epsilon)

    def __add__(self, other: Mechanism) -> Composition:
        if not isinstance(other, Mechanism):
            return NotImplemented
        return Composition((*self.phases, *other.phases))

    def __mul__(self, count: int) -> Composition:
        times = _validate.integer("count", count, 0)
        return Composition(tuple((mechanism, times * n) for mechanism, n in self.phases))

    __rmul__ = __mul__

    def _composed(self, adjacency: Adjacency, direction: Direction) -> Composed:
        return Composed.of((single.loss(adjacency, direction), count) for single, count in self.phases)


class SingleMechanism(Mechanism):
    """One release, with the loss by which it is known to the accountant."""

    @property
    def phases(self) -> tuple[tuple[SingleMechanism, int], ...]:
        """Itself, once."""
        return ((self, 1),)

    @abstractmethod
    def loss(self, adjacency: Adjacency, direction: Direction) -> Loss:
        """The privacy loss of a pair that dominates every pair of neighbours in this direction.

        Args:
            adjacency: Which data sets are neighbours.
            direction: One of :func:`lightning_dp.accounting.adjacency.directions`.

        Raises:
            IncomparableError: The mechanism's guarantee says nothing under this adjacency.
        """


@dataclass(frozen=True, eq=False)
class Composition(Mechanism):
    """Several mechanisms on the same records; equal ones are counted, and order does not matter for equality.

    Args:
        parts: Pairs of a mechanism and a count of at least 0; compositions among them are taken apart.
    """

    parts: Iterable[tuple[Mechanism, int]] = ()

    def __post_init__(self) -> None:
        counts: dict[SingleMechanism, int] = {}
        for part in self.parts:
            if not isinstance(part, tuple | list) or len(part) != 2 or not isinstance(part[0], Mechanism):
                raise InvalidValueError(f"`parts` must hold pairs of a mechanism and a count, got {part!r} in it.")
            mechanism, count = part
            times = _validate.integer("count", count, 0)
            for single, n in mechanism.phases:
                counts[single] = counts.get(single, 0) + times * n
        for single, total in counts.items():
            if total > _MOST:
                raise InvalidValueError(f"`count` of {single!r} must be at most 2**53, got {total}.")
        object.__setattr__(self, "parts", tuple((single, n) for single, n in counts.items() if n))

    @property
    def phases(self) -> tuple[tuple[SingleMechanism, int], ...]:
        """Distinct mechanisms in order of first appearance, with their counts."""
        return tuple(self.parts)  # type: ignore[arg-type]

    def group(self, size: int) -> Composition:
        """See :meth:`Mechanism.group`."""
        return Composition(tuple((single.group(size), count) for single, count in self.phases))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        parts = [{"mechanism": mechanism.to_dict(), "count": count} for mechanism, count in self.phases]
        return {"kind": "composition", "parts": parts}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composition):
            return NotImplemented
        return frozenset(self.phases) == frozenset(other.phases)

    def __hash__(self) -> int:
        return hash(frozenset(self.phases))
