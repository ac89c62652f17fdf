"""Variants in turns: the machine's moods hit all of them alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from workloads.meter import Turn
from workloads.worker import Problem, Settings, Worker

_SLOW = 10.0  # seconds of an update from which it is not repeated
_WARM_UP = 3  # updates; ways are chosen and memory is made in the first ones
_FOR_MEMORY = 5  # updates after the first one in which memory is measured


@dataclass
class Series:
    """The turns of one variant, one a round, and what else was measured, or why there is nothing.

    Attributes:
        first: The first update.
        turns: The later ones.
        memory: The first update and some later ones in a process of their own.
        problem: Why something is missing.
    """

    first: Turn | None = None
    turns: list[Turn] = field(default_factory=list)
    memory: tuple[Turn, Turn] | None = None
    problem: Problem | None = None

    @property
    def seconds(self) -> list[float]:
        """Time per record, by round."""
        return [turn.seconds / turn.records for turn in self.turns]


Row = dict[str, Series]


def measure(
    workload: str,
    variants: Sequence[str],
    settings: Settings,
    *,
    rounds: int,
    turn_seconds: float,
    progress: Callable[[str], None],
) -> Row:
    """Measures all variants of one workload.

    Args:
        workload: Its name.
        variants: Their names.
        settings: How they run.
        rounds: How often each takes its turn.
        turn_seconds: About how long a turn lasts, of one update at least.
        progress: Told what is going on.
    """
    row: Row = {variant: Series() for variant in variants}
    workers: dict[str, Worker] = {}
    updates: dict[str, int] = {}
    try:
        for variant in variants:
            progress(f"{workload}: {variant} warms up")
            workers[variant] = worker = Worker(workload, variant, settings)
            row[variant].first = first = worker.turn(1)
            warm = worker.turn(_WARM_UP) if first is not None and first.seconds < _SLOW else first
            if warm is not None:
                updates[variant] = max(1, math.ceil(turn_seconds * warm.updates / max(warm.seconds, 1e-9)))
            row[variant].problem = worker.problem
        for turn_of in range(rounds):
            for variant, series in row.items():
                if series.problem or (series.turns and _is_slow(series.turns[-1])):
                    continue
                progress(f"{workload}: round {turn_of + 1} of {rounds}, {variant}")
                turn = workers[variant].turn(updates[variant])
                if turn is None:
                    series.problem = workers[variant].problem
                else:
                    series.turns.append(turn)
    finally:
        for worker in workers.values():
            worker.stop()
    for variant, series in row.items():
        if not series.problem:
            progress(f"{workload}: memory, {variant}")
            series.memory = _memory(workload, variant, settings)
    return row


def _memory(workload: str, variant: str, settings: Settings) -> tuple[Turn, Turn] | None:
    """The first update and later ones where freed memory does not count."""
    worker = Worker(workload, variant, replace(settings, returns_memory=settings.device == "cpu"))
    try:
        first, later = worker.turn(1), worker.turn(_FOR_MEMORY)
        return None if first is None or later is None else (first, later)
    finally:
        worker.stop()


def _is_slow(turn: Turn) -> bool:
    return turn.seconds > _SLOW * turn.updates


def ratios(row: Row, variant: str, reference: str) -> list[float]:
    """Time over that of the reference in the same round, by round."""
    return [mine / plain for mine, plain in zip(row[variant].seconds, row[reference].seconds, strict=False)]


def time_ratio(row: Row, variant: str, reference: str) -> float | None:
    """The median of the ratios, if there are any."""
    found = ratios(row, variant, reference)
    return statistics.median(found) if found else None


def memory_ratio(row: Row, variant: str, reference: str, *, first: bool = False) -> float | None:
    """The peak of later updates, or of the first one, over the reference's of later ones, if both were measured."""
    mine, plain = row[variant].memory, row[reference].memory
    return None if mine is None or plain is None else mine[0 if first else 1].peak / plain[1].peak
