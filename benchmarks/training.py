"""What an update of private training costs, here and with other libraries, beside one of plain Lightning.

Run: ``make bench``, or ``PYTHONPATH=. .venv/bin/python benchmarks/training.py --help``. All of it takes half an hour,
``--quick`` a minute.

Each variant has a process of its own, one runs at a time, and they take turns in every round. Time is that of the
processor with one thread, or on the wall with ``--threads 2`` or ``--device cuda``; ratios are formed inside a round,
and the table shows their median and quartiles. Plain Lightning sees the very batches that ours draw, Poisson samples
whose size varies, so that time is counted per record. Memory is measured in other processes, in which the C library
gives freed memory back: the largest resident size (CUDA: of the allocator) over that before the first update. The first
update, in which memory is made, modules are checked and ways are chosen, is shown apart. Peers have batches of a fixed
size and loops of their own without a Trainer, which is to their advantage.
"""

from __future__ import annotations

import argparse
import sys

from workloads import report
from workloads.catalog import WORKLOADS
from workloads.rounds import Row, measure
from workloads.variants import OURS, PLAIN, VARIANTS
from workloads.worker import Settings

QUICK = ("mnist_256", "mlp_4096", "emb_64")


def progress(line: str) -> None:
    """Shows what is going on, where somebody is watching."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "\n".join(f"  {name}: {workload.about}" for name, workload in WORKLOADS.items())
    parser.epilog = f"workloads:\n{about}\n\nvariants: {'; '.join(VARIANTS)}"
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), metavar="NAME", help="some of them")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), metavar="NAME", help="beside plain Lightning")
    parser.add_argument("--rounds", type=int, help="how often each variant takes its turn (default: 7, quick: 3)")
    parser.add_argument("--turn-seconds", type=float, help="about how long a turn lasts (default: 1, quick: 0.3)")
    parser.add_argument("--quick", action="store_true", help=f"ours and plain only; by default {', '.join(QUICK)}")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: 1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a variant is given up")
    parser.add_argument("--markdown", action="store_true", help="print tables for the documentation")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if a target is missed")
    return parser.parse_args()


def main() -> int:
    """Prints the tables."""
    options = arguments()
    settings = Settings(device=options.device, threads=options.threads, limit=options.limit)
    variants = options.variants or ([OURS] if options.quick else list(VARIANTS))
    rows: dict[str, Row] = {}
    for workload in options.workloads or (QUICK if options.quick else WORKLOADS):
        rows[workload] = measure(
            workload,
            [PLAIN, *(variant for variant in variants if variant != PLAIN)],
            settings,
            rounds=options.rounds or (3 if options.quick else 7),
            turn_seconds=options.turn_seconds or (0.3 if options.quick else 1.0),
            progress=progress,
        )
    progress("")
    print(report.machine(settings))
    print(f"\nTime of an update over plain Lightning's\n\n{report.times(rows, markdown=options.markdown)}")
    print(f"\nPeak memory over plain Lightning's\n\n{report.memories(rows, markdown=options.markdown)}")
    print(f"\nSeconds of the first update\n\n{report.first_updates(rows, markdown=options.markdown)}")
    if text := report.notes(rows):
        print(f"\n{text}")
    missed = report.misses(rows) if options.check else []
    if missed:
        print("\nMissed:\n" + "\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
