"""Counts updates, time and memory inside the process that trains, and makes it wait for its turn."""

from __future__ import annotations

import contextlib
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

_STATUS = Path("/proc/self/status")


class Turn(NamedTuple):
    """What one turn of a variant took.

    Attributes:
        seconds: Time of all its updates: of the processor where one thread computes, else on the wall.
        records: Records of all its updates.
        updates: How many there were.
        peak: Bytes of the largest memory in this turn, over what was there before the first update.
    """

    seconds: float
    records: int
    updates: int
    peak: int


class Meter:
    """Called by a variant after each of its updates; returns when the next one may start.

    Args:
        pipe: Where the numbers of updates come from, and the figures go to.
        device: Where training runs.
        wall: Whether to measure time on the wall.
    """

    def __init__(self, pipe: Connection, device: torch.device, *, wall: bool) -> None:
        self.device = device
        self._pipe = pipe
        self._clock = time.perf_counter if wall or device.type == "cuda" else time.process_time
        self._left, self._updates, self._records, self._began, self._baseline = 0, 0, 0, 0.0, 0

    def start(self) -> None:
        """Called when everything is built and the first update may come."""
        self._synchronize()
        self._baseline = torch.cuda.memory_allocated() if self.device.type == "cuda" else _resident()
        self._pipe.send(None)
        self._wait()

    def update(self, records: int) -> None:
        """Called after an update of so many records."""
        self._records += records
        self._left -= 1
        if not self._left:
            self._synchronize()
            seconds = self._clock() - self._began
            self._pipe.send(Turn(seconds, self._records, self._updates, self._peak() - self._baseline))
            self._wait()

    def _wait(self) -> None:
        self._left = self._updates = self._pipe.recv()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            _reset_peak()
        self._records, self._began = 0, self._clock()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else _resident_peak()


def _reset_peak() -> None:
    # Linux forgets the largest resident size when this is written; elsewhere importing may count as training.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident() -> int:
    return _kilobytes("VmRSS") * 1024 or _resident_peak()


def _resident_peak() -> int:
    return (_kilobytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _kilobytes(field: str) -> int:
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)
