"""A process of its own for each variant, which takes its turn when it is asked."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import multiprocessing.context
import os
import resource
import sys
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from workloads.catalog import WORKLOADS
from workloads.meter import Meter, Turn
from workloads.variants import VARIANTS

_MMAP_THRESHOLD, _LARGE = -3, 2**16  # of glibc's malloc.h
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How everything runs.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        threads: Threads of PyTorch; with more than one, time is that on the wall.
        memory: GiB that a process may ask for on the CPU.
        limit: Seconds that a process may take to start, and for a turn.
        returns_memory: Whether the C library gives large pieces back at once, so that a process holds what it uses.
    """

    device: str = "cpu"
    threads: int = 1
    memory: int = 8
    limit: float = 120.0
    returns_memory: bool = False


class Problem(NamedTuple):
    """Why there are no figures.

    Attributes:
        short: For a cell of a table.
        text: For a note below it.
    """

    short: str
    text: str


class Worker:
    """Trains one workload in one variant, in a process that is killed when it takes too long.

    Args:
        workload: Name of the workload.
        variant: Name of the variant.
        settings: How it runs.
    """

    def __init__(self, workload: str, variant: str, settings: Settings) -> None:
        self._settings = settings
        context = _context(settings.threads)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(workload, variant, settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.problem: Problem | None = None
        self._receive()

    def turn(self, updates: int) -> Turn | None:
        """Lets it train for so many updates; ``None`` if it cannot, which :attr:`problem` explains."""
        if self.problem is None:
            self._pipe.send(updates)
        return self._receive()

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()

    def _receive(self) -> Turn | None:
        limit = self._settings.limit
        if self.problem is not None:
            return None
        if not self._pipe.poll(limit):
            self.problem = Problem(f"> {limit:g} s", f"one turn takes more than {limit:g} s")
        else:
            try:
                answer = self._pipe.recv()
            except EOFError:
                answer = Problem("crashed", "the process died")
            if isinstance(answer, Turn):
                return answer
            self.problem = answer
        if self.problem is not None:
            self.stop()
        return None


def _context(threads: int) -> multiprocessing.context.ForkServerContext:
    """Processes that are forked from one that has imported everything, which takes longer than a turn."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11 does not tell the server
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "opacus"])
    return context


def _serve(workload: str, variant: str, settings: Settings, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(settings.threads)
    if settings.returns_memory:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
    if settings.device == "cpu":
        limit = settings.memory * 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        VARIANTS[variant](WORKLOADS[workload], Meter(pipe, torch.device(settings.device), wall=settings.threads > 1))
    except EOFError:  # nobody asks any more
        return
    except Exception as error:  # whatever a peer raises is a result
        pipe.send(_explained(error, settings))


def _explained(error: Exception, settings: Settings) -> Problem:
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return Problem("not installed", text)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        size = f"> {settings.memory} GiB" if settings.device == "cpu" else "out of memory"
        return Problem(size, text[:200])
    return Problem("fails", f"{type(error).__name__}: {text[:200]}")
