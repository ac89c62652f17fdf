"""The record of what was released. Accountants read it; nothing re-derives it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting import adjacency as adjacencies
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.filter import RenyiFilter
from lightning_dp.accounting.guarantee import ADJACENCY, UNIT, Guarantee, check_unit, refuse_other_kind
from lightning_dp.accounting.mechanisms import Composition, Mechanism, mechanism_from_dict
from lightning_dp.accounting.mechanisms.base import SingleMechanism, checked
from lightning_dp.accounting.odometer import RenyiOdometer
from lightning_dp.accounting.profile import RunningEpsilon
from lightning_dp.errors import BudgetExceededError, InvalidValueError, LedgerError

_FORMAT = 2
_READABLE = (1, 2)  # 1 knew neither `rows_per_unit` nor `chosen_from_outputs`


def new_release_id() -> str:
    """An identifier that no other run has."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """How often one run released the outcome of one mechanism.

    Attributes:
        release_id: The run.
        mechanism: What was executed each time.
        count: How many times.
        purpose: What for, such as ``"training"``.
    """

    release_id: str
    mechanism: Mechanism
    count: int
    purpose: str


class Ledger:
    """An append-only record of executed releases on one data set.

    Counts only ever grow: :meth:`record` adds, :meth:`merge` keeps the larger count of each release, and nothing
    removes. A checkpoint that is loaded therefore cannot lower what has been spent in this process.

    As long as every mechanism is fixed before the first outcome is seen, epsilon is that of their composition, exactly.
    From the first entry on that was chosen from earlier outputs, it is the reading of a
    :class:`~lightning_dp.accounting.odometer.RenyiOdometer` over all entries, which is larger and stays valid.

    Args:
        adjacency: Which data sets are neighbours: ``"add_remove"``, ``"replace_one"`` or ``"zero_out"``.
        unit: What is protected: ``"record"``, or the owner of records, such as ``"user"``.
        rows_per_unit: Most records that one unit owns. Mechanisms are recorded as they are for one record; readings are
            for a unit of so many.
        chosen_from_outputs: Whether mechanisms will be chosen from earlier outputs. Say so before the first outcome if
            it is known then. If it is the outputs that lead to choosing from outputs, say it with :meth:`record`; each
            reading then holds at twice its delta, for that decision is one between two numbers.

    Raises:
        InvalidValueError: An argument is out of range.

    Example:
        >>> from lightning_dp import Gaussian, Ledger, PoissonSampled
        >>> ledger = Ledger()
        >>> ledger.epsilon(delta=1e-5)
        0.0
        >>> _ = ledger.record(PoissonSampled(Gaussian(1.0), 0.01), count=1000)
        >>> round(ledger.epsilon(delta=1e-5), 4)
        1.8282
    """

    def __init__(
        self,
        *,
        adjacency: Adjacency = ADJACENCY,
        unit: str = UNIT,
        rows_per_unit: int = 1,
        chosen_from_outputs: bool = False,
    ) -> None:
        self.adjacency = adjacencies.checked(adjacency)
        self.unit, self.rows_per_unit = check_unit(unit, rows_per_unit)
        self._entries: dict[tuple[str, str, Mechanism], int] = {}
        self._stamps: dict[str, None] = {}
        self._totals: dict[SingleMechanism, int] = {}
        self._running: RunningEpsilon | None = None
        self._chosen_from_outputs = _validate.flag("chosen_from_outputs", chosen_from_outputs)
        self._odometer = RenyiOdometer(adjacency=self.adjacency, rows_per_unit=self.rows_per_unit)
        self._not_in_odometer: dict[SingleMechanism, int] = {}

    def __repr__(self) -> str:
        released = Composition(tuple(self._totals.items()))
        return f"Ledger({released!r}, adjacency={self.adjacency!r}, unit={self.unit!r}, stamps={len(self._stamps)})"

    def record(
        self,
        mechanism: Mechanism,
        *,
        release_id: str | None = None,
        purpose: str = "training",
        count: int = 1,
        chosen_from_outputs: bool = False,
    ) -> str:
        """Writes down ``count`` releases. Call it before the outcome is visible to anyone.

        Args:
            mechanism: What is executed.
            release_id: The run it belongs to; a new one if ``None``.
            purpose: What for.
            count: How many times, at least 1.
            chosen_from_outputs: Whether a parameter of the mechanism, its count, or whether it ran at all, was chosen
                after a look at earlier outputs on these records. True holds for the whole ledger, for good.

        Returns:
            The release id.

        Raises:
            InvalidValueError: An argument has the wrong type or is out of range; nothing was recorded then.
        """
        mechanism = checked("mechanism", mechanism)
        for name, text in (("release_id", release_id or ""), ("purpose", purpose)):
            if not isinstance(text, str):
                raise InvalidValueError(f"`{name}` must be a string, got {text!r} of type {type(text).__name__}.")
        count = _validate.integer("count", count, minimum=1)
        chosen_from_outputs = _validate.flag("chosen_from_outputs", chosen_from_outputs)
        release_id = release_id or new_release_id()
        self._add((release_id, purpose, mechanism), count)
        # PRIVACY: never back to False: the entries stay, and so does the way in which they were chosen.
        self._chosen_from_outputs |= chosen_from_outputs
        return release_id

    def stamp(self, reason: str) -> None:
        """Notes, for good, something that weakens the guarantee beyond its numbers."""
        self._stamps[reason] = None

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The entries, oldest first."""
        return tuple(
            LedgerEntry(release_id=release_id, purpose=purpose, mechanism=mechanism, count=count)
            for (release_id, purpose, mechanism), count in self._entries.items()
        )

    @property
    def stamps(self) -> tuple[str, ...]:
        """What weakens the guarantee beyond its numbers."""
        return tuple(self._stamps)

    @property
    def chosen_from_outputs(self) -> bool:
        """Whether something in the ledger was chosen from earlier outputs, so that readings are an odometer's."""
        return self._chosen_from_outputs

    @property
    def num_updates(self) -> int:
        """Number of releases made for training."""
        return sum(count for (_, purpose, _), count in self._entries.items() if purpose == "training")

    def composition(self) -> Mechanism:
        """Everything that was released, as one mechanism.

        Raises:
            LedgerError: Something was chosen from earlier outputs. The mechanisms that happened to run do not bound
                what was spent then; ask :meth:`epsilon`, or :meth:`filter` for what may still be released.
        """
        if self._chosen_from_outputs:
            raise LedgerError(
                "Mechanisms in this ledger were chosen from earlier outputs, so that the composition of those that"
                " happened to run understates what was spent. Ask `ledger.epsilon(delta)` for what was spent, and"
                " `ledger.filter(epsilon=..., delta=...)` for what may still be released."
            )
        return Composition(self._phases())

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at ``delta`` for everything released; 0 if nothing was, infinite if noise was missing.

        Args:
            delta: In (0, 1). Where mechanisms were chosen from earlier outputs, it must have been fixed before the
                first of them, and the number is a :class:`~lightning_dp.accounting.odometer.RenyiOdometer`'s.

        Raises:
            InvalidValueError: ``delta`` is out of range.
            IncomparableError: A recorded guarantee says nothing under the ledger's adjacency.
        """
        if self._chosen_from_outputs:
            return self._read_odometer(delta)
        delta = _validate.delta(delta)
        if self.rows_per_unit > 1:
            return self.composition().group(self.rows_per_unit).epsilon(delta, adjacency=self.adjacency)
        if self._running is None or self._running.size != len(self._totals):
            directions = adjacencies.directions(self.adjacency)
            self._running = RunningEpsilon(
                [[single.loss(self.adjacency, direction) for single in self._totals] for direction in directions]
            )
        return self._running.epsilon(tuple(self._totals.values()), delta)

    def guarantee(self, delta: float, *, num_records: int | None = None) -> Guarantee:
        """The guarantee at ``delta`` for everything released.

        Args:
            delta: In (0, 1), and below ``1 / num_records`` where that is known.
            num_records: Size of the data set, if it is public.

        Raises:
            InvalidValueError: ``delta`` is out of range.
        """
        delta = _validate.delta(delta)
        if num_records is not None:
            _validate.delta_below_one_record(delta, num_records)
        return Guarantee(
            epsilon=self.epsilon(delta),
            delta=delta,
            num_updates=self.num_updates,
            num_records=num_records,
            basis="odometer" if self._chosen_from_outputs else "composition",
            stamps=self.stamps,
            **self.kind,
        )

    def filter(self, *, epsilon: float, delta: float) -> RenyiFilter:
        """A filter for further releases that may be chosen from outputs; what the ledger holds is spent in it.

        The whole, ledger and all that the filter lets pass, is then ``(epsilon, delta)``-differentially private. The
        filter does not write into the ledger: record what it lets pass.

        Args:
            epsilon: The budget for everything, fixed before the first outcome on these records was seen.
            delta: In (0, 1), fixed likewise.

        Raises:
            BudgetExceededError: The ledger holds more than the budget already.
            InvalidValueError: An argument is out of range.
        """
        rows = self.rows_per_unit
        budget = RenyiFilter(epsilon=epsilon, delta=delta, adjacency=self.adjacency, rows_per_unit=rows)
        spent = self._phases()
        if spent:
            try:
                budget.spend(Composition(spent))
            except BudgetExceededError:
                raise BudgetExceededError(
                    f"`epsilon={epsilon:g}` at `delta={delta:g}` cannot be kept: what the ledger holds has epsilon"
                    f" {self._read_odometer(delta):.6g} under a Renyi odometer. Choose a larger `epsilon`."
                ) from None
        return budget

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint. Holds no secret: no key, no sample, no noise."""
        entries = [
            {
                "release_id": entry.release_id,
                "purpose": entry.purpose,
                "mechanism": entry.mechanism.to_dict(),
                "count": entry.count,
            }
            for entry in self.entries
        ]
        return {
            "format": _FORMAT,
            **self.kind,
            "chosen_from_outputs": self._chosen_from_outputs,
            "entries": entries,
            "stamps": list(self.stamps),
        }

    def merge(self, state: Mapping[str, Any] | Ledger) -> None:
        """Adds what another ledger, or its ``state_dict``, knows; of a release known to both, the larger count stays.

        Raises:
            LedgerError: The state is damaged. Nothing is changed then.
            IncomparableError: It speaks of another adjacency or unit. Nothing is changed then.
        """
        other = state if isinstance(state, Ledger) else Ledger._parse(state)
        refuse_other_kind(self.kind, other.kind)
        for key, count in other._entries.items():
            # PRIVACY: the maximum, never the loaded value: a ledger must not shrink when an older file is loaded.
            missing = count - self._entries.get(key, 0)
            if missing > 0:
                self._add(key, missing)
        self._chosen_from_outputs |= other.chosen_from_outputs
        self._stamps.update(other._stamps)

    def _add(self, key: tuple[str, str, Mechanism], count: int) -> None:
        phases = key[2].phases
        self._entries[key] = self._entries.get(key, 0) + count
        for single, times in phases:
            for counts in (self._totals, self._not_in_odometer):
                counts[single] = counts.get(single, 0) + times * count

    @property
    def kind(self) -> dict[str, Any]:
        """What must be equal in two of them that are compared or added up."""
        return {"adjacency": self.adjacency, "unit": self.unit, "rows_per_unit": self.rows_per_unit}

    def _phases(self) -> tuple[tuple[SingleMechanism, int], ...]:
        """Distinct single mechanisms with how often each was released, over all entries; kept up as they come in."""
        return tuple(self._totals.items())

    def _read_odometer(self, delta: float) -> float:
        for single in tuple(self._not_in_odometer):
            self._odometer.add(single, self._not_in_odometer[single])
            del self._not_in_odometer[single]
        return self._odometer.epsilon(delta)

    @staticmethod
    def _parse(state: Mapping[str, Any]) -> Ledger:
        try:
            if state["format"] not in _READABLE:
                raise LedgerError(f"The ledger has format {state['format']!r}, expected one of {_READABLE}.")
            newer = state["format"] > 1
            ledger = Ledger(
                adjacency=state["adjacency"],
                unit=state["unit"],
                rows_per_unit=state["rows_per_unit"] if newer else 1,
                chosen_from_outputs=state["chosen_from_outputs"] if newer else False,
            )
            for entry in state["entries"]:
                ledger.record(
                    mechanism_from_dict(entry["mechanism"]),
                    release_id=str(entry["release_id"]),
                    purpose=str(entry["purpose"]),
                    count=entry["count"],
                )
            ledger._stamps.update(dict.fromkeys(map(str, state["stamps"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(
                f"The stored ledger is damaged ({type(error).__name__}: {error}). Restore the file from a"
                " copy: what was spent cannot be known without it."
            ) from error
        return ledger
