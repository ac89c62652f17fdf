"""One call on several processes that find each other, without starting the script again as Lightning would."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch


def run(function: Callable[[], float], ranks: int) -> float:
    """Calls a function, which must be importable, once on each of so many processes; returns what the first one gives.

    Args:
        function: Called on every process, where ``LOCAL_RANK`` is set.
        ranks: Number of processes.

    Raises:
        RuntimeError: A process failed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    port = _free_port()
    started = [context.Process(target=_call, args=(function, rank, port, theirs), daemon=True) for rank in range(ranks)]
    for process in started:
        process.start()
    theirs.close()
    try:
        result: float = ours.recv()
    except EOFError:
        raise RuntimeError("A process of the benchmark failed; its error is above.") from None
    finally:
        for process in started:
            process.join(timeout=30)
            process.kill()
    return result


def _call(function: Callable[[], float], rank: int, port: int, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    result = function()
    if rank == 0:
        pipe.send(result)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
