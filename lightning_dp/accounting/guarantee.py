"""What a ledger promises, in one object that says of whom, against whom and on what grounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_dp import _validate
from lightning_dp.accounting import adjacency as adjacencies
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.errors import IncomparableError, InvalidValueError

ADJACENCY: Adjacency = "add_remove"
UNIT = "record"

Basis = Literal["composition", "odometer"]


def format_epsilon(epsilon: float, decimals: int = 4) -> str:
    """Writes epsilon with a number of decimals, rounded up, so that what is read is never below what holds."""
    if not math.isfinite(epsilon):
        return "infinite"
    scale = 10**decimals
    return f"{math.ceil(epsilon * scale) / scale:.{decimals}f}"


def check_unit(unit: Any, rows_per_unit: Any) -> tuple[str, int]:
    """The name of what is protected and the most records that one of it owns, if they fit together."""
    if not isinstance(unit, str) or not unit.strip():
        raise InvalidValueError(f"`unit` must name what is protected, such as 'record' or 'user', got {unit!r}.")
    rows = _validate.integer("rows_per_unit", rows_per_unit, 1)
    if unit == UNIT and rows > 1:
        raise InvalidValueError(
            f"`rows_per_unit={rows}` does not fit `unit='record'`: a record is one row. Name the owner of the rows,"
            " for example unit='user'."
        )
    return unit, rows


def refuse_other_kind(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuses to go on where two statements are about different things.

    Raises:
        IncomparableError: A value differs; the message names the first that does.
    """
    for name, value in mine.items():
        if theirs[name] != value:
            raise IncomparableError(
                f"`{name}` is {value!r} here and {theirs[name]!r} there. Guarantees of different kinds can neither be"
                " compared nor added up; account for both under the same one."
            )


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """An (epsilon, delta) guarantee with everything needed to read it.

    For all data sets that differ by one unit in the way that ``adjacency`` says, and all sets of outcomes S,
    ``P[M(D) in S] <= exp(epsilon) P[M(D') in S] + delta`` (Dwork, McSherry, Nissim, Smith 2006).

    With ``basis="odometer"`` the number was read off a running interaction, so that it is itself an outcome. The
    statement then holds for every ``e`` fixed in advance and all sets S of outcomes at which the reading is at most
    ``e``, with ``e`` for epsilon; see :class:`~lightning_dp.accounting.odometer.RenyiOdometer`.

    Attributes:
        epsilon: At least 0; infinite if a release carried no noise.
        delta: In [0, 1).
        num_updates: How many releases of a training run it covers.
        adjacency: ``"add_remove"``: one unit present or absent; ``"replace_one"``: one unit has another value;
            ``"zero_out"``: one unit is replaced by a null value.
        unit: What is protected: ``"record"``, one element of the training data set, or its owner, such as ``"user"``.
        rows_per_unit: Most records that one unit may own; units with more are not covered.
        num_records: Number of records, public under this guarantee; ``None`` if none was declared.
        basis: ``"composition"`` of mechanisms fixed in advance, or a reading of a Renyi ``"odometer"``, since
            mechanisms were chosen from earlier outputs.
        stamps: What weakens the guarantee beyond its numbers, such as an insecure seed; empty in a clean run.

    Raises:
        InvalidValueError: An attribute is out of range.

    Example:
        >>> one = Guarantee(epsilon=1.0, delta=1e-6, num_updates=100)
        >>> one.implies(Guarantee(epsilon=2.0, delta=1e-5, num_updates=100))
        True
        >>> (one + one).epsilon
        2.0
    """

    epsilon: float
    delta: float
    num_updates: int
    adjacency: Adjacency = ADJACENCY
    unit: str = UNIT
    rows_per_unit: int = 1
    num_records: int | None = None
    basis: Basis = "composition"
    stamps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _validate.number("epsilon", self.epsilon) >= 0:
            raise InvalidValueError(f"`epsilon` must be at least 0, got {self.epsilon!r}.")
        if not 0 <= _validate.number("delta", self.delta) < 1:
            raise InvalidValueError(
                f"`delta` must be at least 0 and below 1, got {self.delta!r}: from 1 on, every mechanism satisfies it."
            )
        _validate.integer("num_updates", self.num_updates, 0)
        _validate.optional(_validate.integer, "num_records", self.num_records, minimum=0)
        adjacencies.checked(self.adjacency)
        check_unit(self.unit, self.rows_per_unit)
        if self.basis not in get_args(Basis):
            raise InvalidValueError(f"`basis` must be one of {', '.join(get_args(Basis))}, got {self.basis!r}.")

    @property
    def is_private(self) -> bool:
        """Whether epsilon is finite and nothing weakens the guarantee."""
        return math.isfinite(self.epsilon) and not self.stamps

    def implies(self, other: Guarantee) -> bool:
        """Whether whatever has this guarantee has the other one too.

        A partial order: epsilon and delta are both no larger, nothing weakens this one that does not weaken the other,
        and no number of records is public here that is not public there. Of two guarantees with epsilon smaller in one
        and delta smaller in the other, neither implies the other.

        Raises:
            IncomparableError: They differ in adjacency or unit, where neither answer would mean anything.
        """
        refuse_other_kind(self.kind, other.kind)
        return (
            self.epsilon <= other.epsilon
            and self.delta <= other.delta
            and set(self.stamps) <= set(other.stamps)
            and self.num_records in (None, other.num_records)
        )

    def __add__(self, other: Guarantee) -> Guarantee:
        """Both releases on the same records together: basic composition.

        Epsilons and deltas add (Dwork, Kenthapadi, McSherry, Mironov, Naor 2006, Theorem 1); so do the updates, and
        what weakens either weakens the sum. The second release may depend on the outcome of the first, a reading of
        an odometer included: with ``L`` the loss of the first, ``e`` its reading and ``e2`` the epsilon of the second,
        ``E_Q[(exp(L) - exp(e))_+] <= delta`` is all that the proof needs, and ``exp(e + e2)`` stays inside the
        expectation. A ledger that holds all mechanisms gives a smaller number.

        Raises:
            IncomparableError: They differ in adjacency, unit or declared number of records.
            InvalidValueError: The deltas add up to 1 or more.
        """
        if not isinstance(other, Guarantee):
            return NotImplemented
        refuse_other_kind(self.kind, other.kind)
        if None not in (self.num_records, other.num_records):
            refuse_other_kind({"num_records": self.num_records}, {"num_records": other.num_records})
        return Guarantee(
            epsilon=self.epsilon + other.epsilon,
            delta=self.delta + other.delta,
            num_updates=self.num_updates + other.num_updates,
            num_records=other.num_records if self.num_records is None else self.num_records,
            basis="odometer" if "odometer" in (self.basis, other.basis) else "composition",
            stamps=tuple(dict.fromkeys((*self.stamps, *other.stamps))),
            **self.kind,
        )

    def __str__(self) -> str:
        rows = f" (at most {self.rows_per_unit:,} records)" if self.rows_per_unit > 1 else ""
        size = f", N = {self.num_records:,} (public)" if self.num_records is not None else ""
        text = (
            f"({format_epsilon(self.epsilon)}, {self.delta:.3g})-differential privacy, unit: one {self.unit}{rows},"
            f" adjacency: {self.adjacency}{size}, from {self.num_updates:,} executed updates"
        )
        if self.basis == "odometer":
            text += "; adaptively chosen parameters: Renyi odometer, for a delta fixed in advance"
        return text + "".join(f"; NOT VALID AS STATED: {stamp}" for stamp in self.stamps)

    @property
    def kind(self) -> dict[str, Any]:
        """What must be equal in two of them that are compared or added up."""
        return {"adjacency": self.adjacency, "unit": self.unit, "rows_per_unit": self.rows_per_unit}
