"""The record of what was released. Accountants read it; nothing re-derives it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting.guarantee import ADJACENCY, UNIT, Guarantee
from lightning_dp.accounting.mechanisms import Composition, Mechanism, mechanism_from_dict
from lightning_dp.errors import LedgerError

_FORMAT = 1


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

    Example:
        >>> from lightning_dp import Gaussian, Ledger, PoissonSampled
        >>> ledger = Ledger()
        >>> ledger.epsilon(delta=1e-5)
        0.0
        >>> _ = ledger.record(PoissonSampled(Gaussian(1.0), 0.01), count=1000)
        >>> round(ledger.epsilon(delta=1e-5), 4)
        1.8282
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, Mechanism], int] = {}
        self._stamps: dict[str, None] = {}

    def record(
        self,
        mechanism: Mechanism,
        *,
        release_id: str | None = None,
        purpose: str = "training",
        count: int = 1,
    ) -> str:
        """Writes down ``count`` releases. Call it before the outcome is visible to anyone.

        Args:
            mechanism: What is executed.
            release_id: The run it belongs to; a new one if ``None``.
            purpose: What for.
            count: How many times, at least 1.

        Returns:
            The release id.
        """
        count = _validate.integer("count", count, minimum=1)
        release_id = release_id or new_release_id()
        key = (release_id, purpose, mechanism)
        self._entries[key] = self._entries.get(key, 0) + count
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
    def num_updates(self) -> int:
        """Number of releases made for training."""
        return sum(entry.count for entry in self.entries if entry.purpose == "training")

    def composition(self) -> Mechanism:
        """Everything that was released, as one mechanism."""
        total: Mechanism = Composition()
        for entry in self.entries:
            total = total + entry.count * entry.mechanism
        return total

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at ``delta`` for everything released; 0 if nothing was, infinite if noise was missing."""
        return self.composition().epsilon(delta)

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
            stamps=self.stamps,
        )

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
            "adjacency": ADJACENCY,
            "unit": UNIT,
            "entries": entries,
            "stamps": list(self.stamps),
        }

    def merge(self, state: Mapping[str, Any] | Ledger) -> None:
        """Adds what another ledger, or its ``state_dict``, knows; of a release known to both, the larger count stays.

        Raises:
            LedgerError: The state is damaged, or speaks of another adjacency or unit. Nothing is changed then.
        """
        other = state if isinstance(state, Ledger) else Ledger._parse(state)
        for key, count in other._entries.items():
            # PRIVACY: the maximum, never the loaded value: a ledger must not shrink when an older file is loaded.
            self._entries[key] = max(count, self._entries.get(key, 0))
        self._stamps.update(other._stamps)

    @staticmethod
    def _parse(state: Mapping[str, Any]) -> Ledger:
        ledger = Ledger()
        try:
            kind = (state["format"], state["adjacency"], state["unit"])
            if kind != (_FORMAT, ADJACENCY, UNIT):
                raise LedgerError(
                    f"The ledger has format, adjacency and unit {kind}, expected {(_FORMAT, ADJACENCY, UNIT)}."
                    " Guarantees of different kinds cannot be added up."
                )
            for entry in state["entries"]:
                mechanism = mechanism_from_dict(entry["mechanism"])
                ledger.record(
                    mechanism,
                    release_id=str(entry["release_id"]),
                    purpose=str(entry["purpose"]),
                    count=entry["count"],
                )
            ledger._stamps.update(dict.fromkeys(map(str, state["stamps"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(
                f"The ledger in this checkpoint is damaged ({type(error).__name__}: {error}). Restore the file from a"
                " copy: what was spent cannot be known without it."
            ) from error
        return ledger
