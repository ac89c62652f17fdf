"""Calls with a time limit, in a process of its own for each method, where the time is taken too."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import statistics
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from accountants import methods

_MEMORY = 6 * 2**30  # bytes; Opacus prv may ask for hundreds of gigabytes
_START = 120  # seconds for imports
_TURN, _MOST_CALLS = 0.05, 15  # seconds of calls in one turn, and how many at most
_PREPARING = 1.0  # seconds after which no other call is prepared


class Outcome(NamedTuple):
    """What a call returned and how long it took, or why there is nothing."""

    value: float
    seconds: float
    problem: str = ""


class Worker:
    """Runs one method, again and again, in a process that is started when needed and killed when it takes too long."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def call(self, task: str, arguments: tuple[Any, ...], limit: float) -> Outcome:
        """Gives the method one turn.

        Args:
            task: ``"epsilon"`` or ``"calibrate"``.
            arguments: Of the method.
            limit: Seconds that the turn may take.
        """
        pipe = self._started()
        pipe.send((task, arguments))
        if not pipe.poll(limit):
            self.stop()
            return Outcome(float("nan"), limit, f"> {limit:g} s")
        return self._received(pipe)

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None

    def _started(self) -> Connection:
        if self._process is None or self._pipe is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self.method, theirs), daemon=True)
            self._process.start()
            theirs.close()
            if not self._pipe.poll(_START):
                raise TimeoutError(f"The process for {self.method!r} did not start within {_START} s.")
            self._pipe.recv()
        return self._pipe

    def _received(self, pipe: Connection) -> Outcome:
        try:
            outcome: Outcome = pipe.recv()
        except EOFError:
            self.stop()
            return Outcome(float("nan"), 0.0, "crashed")
        return outcome


def _serve(method: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    _answer(method, "epsilon", (((0.3, 2.0, 3),), 1e-5))  # imports, and whatever is set up once
    pipe.send("ready")
    while True:
        pipe.send(_answer(method, *pipe.recv()))


def _answer(method: str, task: str, arguments: tuple[Any, ...]) -> Outcome:
    """One turn: the same call again and again, each time from the start, and the median of what it takes."""
    seconds: list[float] = []
    began = time.perf_counter()
    try:
        while not seconds or (
            sum(seconds) < _TURN and len(seconds) < _MOST_CALLS and time.perf_counter() - began < _PREPARING
        ):
            function = methods.prepared(method, task, arguments)
            start = time.perf_counter()
            value = function()
            seconds.append(time.perf_counter() - start)
        return Outcome(value, statistics.median(seconds))
    except Exception as error:  # whatever a peer raises is a result
        return Outcome(float("nan"), 0.0, type(error).__name__)
