"""How the cost of a private update grows: with the batch, the width, the data set, its chunks and the processes.

Run: ``make bench``, or ``PYTHONPATH=. .venv/bin/python benchmarks/scaling.py --help``. Five minutes.

A plain and a private Trainer take turns in every round; fetching, sampling and Lightning's own loop are included. Time
is that of the processor with one thread, and on the wall for several processes, of one thread each. It is counted per
record, since the size of Poisson batches varies, and shown for an update of the expected size. The ratio is the median
over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from workloads import processes
from workloads.catalog import WORKLOADS, Workload
from workloads.data import loader
from workloads.models import perceptron
from workloads.variants import Classifier

import lightning_dp as ldp

WARM_UP = 3
Strategy = Callable[[int], Any]
MLP, CNN = WORKLOADS["mlp_4096"], WORKLOADS["mnist_256"]


class Clock(pl.Callback):
    """Notes time and number of records at the end of every update.

    Args:
        now: Reads a clock.
        chunks: Batches of an update.
    """

    def __init__(self, now: Callable[[], float], chunks: int) -> None:
        self._now, self._chunks = now, chunks
        self._records = 0
        self._marks: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *seen: Any) -> None:
        """Called after each batch."""
        _, (_, labels), batch_idx = seen
        self._records += len(labels)
        if (batch_idx + 1) % self._chunks == 0:
            self._marks.append((self._now(), self._records))

    @property
    def seconds(self) -> float:
        """Time per record after the warm-up."""
        (began, before), (ended, after) = self._marks[WARM_UP - 1], self._marks[-1]
        return (ended - began) / max(1, after - before)


def plain(ranks: int) -> Any:
    """No privacy."""
    return "auto" if ranks == 1 else "ddp"


def private(ranks: int) -> Any:
    """The default strategy of this library."""
    kind = ldp.PrivateStrategy if ranks == 1 else ldp.PrivateDDPStrategy
    return kind(noise_multiplier=1.0)


def seconds(
    workload: Workload,
    strategy: Strategy,
    *,
    updates: int,
    batches: int = 64,
    chunks: int = 1,
    ranks: int = 1,
) -> float:
    """Time per record of a short training.

    Args:
        workload: Its batch is that of one process and chunk.
        strategy: Makes the strategy for a number of processes.
        updates: How many are run after the warm-up.
        batches: Batches of an epoch.
        chunks: ``accumulate_grad_batches``.
        ranks: Processes.
    """
    clock = Clock(time.process_time if ranks == 1 else time.perf_counter, chunks)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(ranks),
        callbacks=[clock],
        accumulate_grad_batches=chunks,
        max_steps=WARM_UP + updates,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(workload.model()), loader(workload, batches=batches))
    return clock.seconds


def lines(title: str, cases: Iterable[tuple[str, int, Callable[[Strategy], float]]], rounds: int) -> Iterator[str]:
    """A table, line by line: what is varied, both times of an update in milliseconds, and their ratio.

    Args:
        title: What is varied.
        cases: For each line its name, the records of an update, and the time per record with a strategy.
        rounds: How often each strategy takes its turn.
    """
    yield f"{title:<32}{'plain ms':>12}{'private ms':>12}{'ratio':>8}"
    for name, records, measure in cases:
        taken = [(measure(plain), measure(private)) for _ in range(rounds)]
        ratio = statistics.median(ours / theirs for theirs, ours in taken)
        theirs, ours = (1000 * records * statistics.median(column) for column in zip(*taken, strict=True))
        yield f"{name:<32}{theirs:>12.2f}{ours:>12.2f}{ratio:>8.2f}"


def _short(workload: Workload, updates: int, **settings: int) -> Callable[[Strategy], float]:
    return lambda strategy: seconds(workload, strategy, updates=updates, **settings)


def against_batch(updates: int, rounds: int) -> Iterator[str]:
    """Ever larger batches of two models."""
    for name, workload, sizes in (("MLP", MLP, (64, 256, 1024, 4096, 16_384)), ("CNN", CNN, (16, 64, 256, 1024))):
        cases = [(f"{size:,}", size, _short(replace(workload, batch=size), updates)) for size in sizes]
        yield from lines(f"{name}, records of a batch", cases, rounds)


def against_width(updates: int, rounds: int) -> Iterator[str]:
    """Ever wider layers."""
    cases = [
        (f"{width:,}", 256, _short(replace(MLP, batch=256, model=partial(perceptron, width)), updates))
        for width in (64, 256, 1024, 2048)
    ]
    yield from lines("MLP, batch 256, width", cases, rounds)


def against_records(updates: int, rounds: int) -> Iterator[str]:
    """Ever more records, of which an update draws 256."""
    batches = [math.ceil(count / 256) for count in (10_000, 100_000, 1_000_000, 10_000_000)]
    cases = [(f"{256 * count:,}", 256, _short(replace(MLP, batch=256), updates, batches=count)) for count in batches]
    yield from lines("MLP, batch 256, records", cases, rounds)


def against_chunks(updates: int, rounds: int) -> Iterator[str]:
    """The same update in ever more physical batches."""
    cases = [
        (f"{chunks}", 1024, _short(replace(MLP, batch=1024 // chunks), updates, batches=64 * chunks, chunks=chunks))
        for chunks in (1, 2, 4, 8, 16)
    ]
    yield from lines("MLP, 1,024 records, chunks", cases, rounds)


def against_ranks(updates: int, rounds: int) -> Iterator[str]:
    """The same update on one and on two processes."""

    def measure(ranks: int, strategy: Strategy) -> float:
        workload = replace(MLP, batch=4096 // ranks)
        return processes.run(partial(seconds, workload, strategy, updates=updates, ranks=ranks), ranks) / ranks

    cases = [(f"{ranks}", 4096, partial(measure, ranks)) for ranks in (1, 2)]
    yield from lines("MLP, 4,096 records, processes", cases, rounds)


TABLES = {
    "batch": against_batch,
    "width": against_width,
    "records": against_records,
    "chunks": against_chunks,
    "ranks": against_ranks,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="what to vary")
    parser.add_argument("--rounds", type=int, default=3, help="how often each strategy takes its turn")
    parser.add_argument("--updates", type=int, default=20, help="updates of each turn")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in options.tables:
        for line in itertools.chain(TABLES[name](options.updates, options.rounds), [""]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
