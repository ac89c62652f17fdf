"""Tables of what was measured, and what does not meet its target."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from workloads.catalog import WORKLOADS, Target
from workloads.rounds import Row, memory_ratio, ratios, time_ratio
from workloads.variants import FRUGAL, OURS, PLAIN, is_peer
from workloads.worker import Settings

_MEBIBYTE = 2**20


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """Columns of text, or a table for the documentation."""
    if markdown:
        return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines))
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in (header, *lines)
    )


def times(rows: dict[str, Row], *, markdown: bool) -> str:
    """The time of an update, in milliseconds for plain Lightning, over that for the others: median and quartiles."""
    return _by_variant(rows, _milliseconds, _time, markdown=markdown)


def memories(rows: dict[str, Row], *, markdown: bool) -> str:
    """The peak memory, in MiB for plain Lightning, over that for the others; that of the first update if larger."""
    return _by_variant(rows, _mebibytes, _memory, markdown=markdown)


def first_updates(rows: dict[str, Row], *, markdown: bool) -> str:
    """Seconds of the first update, in which memory is made, modules are checked, and ways are chosen."""
    return _by_variant(rows, lambda _, row: _first(row, PLAIN), _first, markdown=markdown)


def notes(rows: dict[str, Row]) -> str:
    """Why there are no figures where there are none."""
    found = [
        f"{workload}, {variant}: {series.problem.text}"
        for workload, row in rows.items()
        for variant, series in row.items()
        if series.problem is not None
    ]
    return "\n".join(found)


def misses(rows: dict[str, Row]) -> list[str]:
    """What is slower or larger than its target, and who is faster."""
    return [miss for workload, row in rows.items() for miss in _misses(workload, row)]


def _misses(workload: str, row: Row) -> Iterator[str]:
    for variant, target in ((OURS, WORKLOADS[workload].target), (FRUGAL, WORKLOADS[workload].frugal)):
        if variant in row and target is not None:
            yield from _beyond(f"{workload}, {variant}", row, variant, target)
    ours = time_ratio(row, OURS, PLAIN) if OURS in row else None
    for variant in filter(is_peer, row):
        theirs = time_ratio(row, variant, PLAIN)
        if theirs is not None and ours is not None and theirs <= ours:
            yield f"{workload}: {variant} takes {theirs:.2f} of plain Lightning's time, ours {ours:.2f}"


def _beyond(name: str, row: Row, variant: str, target: Target) -> Iterator[str]:
    time, memory = time_ratio(row, variant, PLAIN), memory_ratio(row, variant, PLAIN)
    if time is None or memory is None:
        yield f"{name}: no figures"
        return
    if time > target.time:
        yield f"{name}: time {time:.2f}, target {target.time:g}"
    for when, ratio in (("", memory), (" of the first update", memory_ratio(row, variant, PLAIN, first=True))):
        if ratio is not None and ratio > target.memory:
            yield f"{name}: memory{when} {ratio:.2f}, target {target.memory:g}"


def machine(settings: Settings) -> str:
    """What the figures depend on."""
    if settings.device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        where = f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {settings.threads} used"
    packages = [
        f"{name} {version}" for name in ("torch", "lightning", "opacus", "opake") if (version := _version(name))
    ]
    return f"{where}; Python {platform.python_version()}, {', '.join(packages)}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _by_variant(
    rows: dict[str, Row], reference: Callable[[str, Row], str], other: Callable[[Row, str], str], *, markdown: bool
) -> str:
    first = [PLAIN, *(reference(workload, row) for workload, row in rows.items())]
    variants = [variant for variant in next(iter(rows.values())) if variant != PLAIN]
    rest = [[variant, *(other(row, variant) for row in rows.values())] for variant in variants]
    return table(["", *rows], [first, *rest], markdown=markdown)


def _milliseconds(workload: str, row: Row) -> str:
    if not row[PLAIN].turns:
        return _reason(row, PLAIN)
    return f"{1000 * WORKLOADS[workload].batch * statistics.median(row[PLAIN].seconds):.3g} ms"


def _mebibytes(workload: str, row: Row) -> str:
    memory = row[PLAIN].memory
    return _reason(row, PLAIN) if memory is None else f"{memory[1].peak / _MEBIBYTE:.0f} MiB"


def _time(row: Row, variant: str) -> str:
    found = ratios(row, variant, PLAIN)
    if not found:
        return _reason(row, variant)
    middle = _figure(statistics.median(found))
    if len(found) < 3:
        return middle
    low, _, high = statistics.quantiles(found, n=4, method="inclusive")
    return f"{middle} ({_figure(low)}-{_figure(high)})"


def _memory(row: Row, variant: str) -> str:
    ratio = memory_ratio(row, variant, PLAIN)
    if ratio is None:
        return _reason(row, variant)
    first = memory_ratio(row, variant, PLAIN, first=True)
    at_first = f" (first {_figure(first)})" if first is not None and first > 1.05 * ratio else ""
    return f"{_figure(ratio)}{at_first}"


def _first(row: Row, variant: str) -> str:
    first = row[variant].first
    return _reason(row, variant) if first is None else f"{first.seconds:.2f}"


def _reason(row: Row, variant: str) -> str:
    problem = row[variant].problem
    return "" if problem is None else problem.short


def _figure(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
