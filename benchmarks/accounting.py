"""What an epsilon costs and how exact it is, here and with other accountants.

Run: ``make bench``, or ``.venv/bin/python benchmarks/accounting.py --help``. Two minutes; ``--full`` a quarter of an
hour. The others are installed by ``pip install -e '.[bench]'``; those that are not are shown as "not installed".

Each method has a process of its own, one runs at a time, and they take turns in every round. In its turn a method
answers the same question for 50 ms, or once if it takes longer. A figure is the median over turns of their medians, in
milliseconds; a method that takes more than a second has one turn, and one that exceeds the limit is killed, and skipped
for the targets that follow. "Cold" clears every cache of this library before each call. "Ledger" records one update
more and reads epsilon, as a monitor does after every update. Relative errors refer to stored values
of 40-digit arithmetic, which ``--reference`` computes again. A method is tight in a case if its epsilon is at most 1e-6
above the truth and at most 1e-9 below it, relative to the truth.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from accountants import exact
from accountants.methods import CALIBRATIONS, METHODS, OURS, ours, version_of
from accountants.worker import Outcome, Worker

ABOVE, BELOW = 1e-6, 1e-9  # a tight epsilon is at most so far above and below the truth
SLOW = 1.0  # seconds from which a call is not repeated
CALIBRATED = (0.01, 1000, 1e-5)  # sampling rate, updates and delta of case A
TARGETS = (1.0, 2.0, 8.0)


@dataclass
class Series:
    """The outcomes of one method for one question, over rounds, or why it was not asked."""

    missing: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether another round would take too long, or fail again."""
        return any(outcome.problem or outcome.seconds > SLOW for outcome in self.outcomes)

    @property
    def problem(self) -> str:
        """Why there is no number, or nothing."""
        return self.outcomes[0].problem if self.outcomes else self.missing

    @property
    def value(self) -> float:
        """What the method returned."""
        return self.outcomes[0].value

    @property
    def milliseconds(self) -> float:
        """Median time of a call."""
        return 1000 * statistics.median(outcome.seconds for outcome in self.outcomes)


Row = dict[str, Series]


def measure(workers: dict[str, Worker], task: str, arguments: tuple[object, ...], rounds: int, limit: float) -> Row:
    """Asks every method the same question, in turns; one without a worker keeps an empty series."""
    methods = METHODS if task == "epsilon" else CALIBRATIONS
    row = {method: Series("skipped" if version_of(method) else "not installed") for method in methods}
    for _ in range(rounds):
        for method, series in row.items():
            if method in workers and not series.done:
                series.outcomes.append(workers[method].call(task, arguments, limit))
    return row


def tight(value: float, truth: float) -> bool:
    """Whether an epsilon is a valid bound without slack that matters."""
    return truth * (1 - BELOW) <= value <= truth * (1 + ABOVE)


def fastest_tight_peer(row: Row, truth: float) -> tuple[str, str]:
    """The fastest other method that is tight, and how many times longer than ours (cold) it takes."""
    peers = [m for m, series in row.items() if m not in OURS and not series.problem and tight(series.value, truth)]
    if not peers:
        return "none", "-"
    best = min(peers, key=lambda method: row[method].milliseconds)
    return best, f"{row[best].milliseconds / row['ours cold'].milliseconds:.0f}x"


def table(header: Sequence[str], lines: Sequence[Sequence[str]], markdown: bool) -> str:
    """Columns of text, or a table for the documentation."""
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *lines)
    )


def speed_and_error(rows: dict[str, Row], markdown: bool) -> str:
    """One table of milliseconds and one of epsilon and relative errors."""
    truths, speeds, errors = exact.truths(), [], []
    for name, row in rows.items():
        times = [series.problem or f"{series.milliseconds:.3g}" for series in row.values()]
        speeds.append([name, *times, *fastest_tight_peer(row, truths[name])])
        relative = [series.problem or f"{series.value / truths[name] - 1:+.0e}" for series in row.values()]
        errors.append([name, f"{truths[name]:.10f}", *relative])
    return "\n\n".join(
        [
            "Milliseconds for one epsilon",
            table(["case", *METHODS, "fastest tight peer", "over ours cold"], speeds, markdown),
            "Exact epsilon, and the relative error of each method",
            table(["case", "epsilon", *METHODS], errors, markdown),
        ]
    )


def calibrations(rows: dict[float, Row], markdown: bool) -> str:
    """Noise multipliers for targets at case A, the epsilon they reach, and the time to find them."""
    rate, updates, delta = CALIBRATED
    lines = []
    for target, row in rows.items():
        for method, series in row.items():
            cells = [f"{target:g}", method]
            if series.problem:
                lines.append([*cells, "", "", series.problem])
                continue
            reached = ours(((rate, series.value, updates),), delta)
            lines.append([*cells, f"{series.value:.6f}", f"{reached:.6f}", f"{series.milliseconds:.3g}"])
    title = f"Noise multiplier for a target epsilon, {updates} updates at rate {rate}, delta {delta:g}"
    header = ["target", "method", "noise multiplier", "epsilon reached", "milliseconds"]
    return f"{title}\n\n{table(header, lines, markdown)}"


def machine() -> str:
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    versions = ", ".join(f"{package} {version(package)}" for package in ("numpy", "scipy", "opacus"))
    google, opake = version_of("PLD 1e-3"), version_of("opake")
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, 1 thread; Python"
        f" {platform.python_version()}, {versions}, dp-accounting {google}, opake-accounting {opake}"
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="seven rounds and 45 s a call, instead of three and 5 s")
    parser.add_argument("--cases", nargs="+", choices=list(exact.CASES), default=list(exact.CASES))
    parser.add_argument("--markdown", action="store_true", help="print tables for the documentation")
    parser.add_argument(
        "--reference", action="store_true", help="compute the stored exact values of the cases again, and stop"
    )
    options = parser.parse_args()
    if options.reference:
        exact.renew(options.cases)
        return
    rounds, limit = (7, 45.0) if options.full else (3, 5.0)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[variable] = "1"
    workers = {method: Worker(method) for method in METHODS if version_of(method)}
    rows = {name: measure(workers, "epsilon", exact.CASES[name], rounds, limit) for name in options.cases}
    rate, updates, delta = CALIBRATED
    found: dict[float, Row] = {}
    quick = workers
    for target in TARGETS:
        found[target] = measure(quick, "calibrate", (rate, updates, target, delta), 1 + 2 * options.full, limit)
        quick = {method: worker for method, worker in quick.items() if not found[target].get(method, Series()).problem}
    for worker in workers.values():
        worker.stop()
    print(machine())
    print(f"\n{speed_and_error(rows, options.markdown)}\n\n{calibrations(found, options.markdown)}")


if __name__ == "__main__":
    main()
