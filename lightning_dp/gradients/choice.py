"""Which way to the norms each parameter takes: by operations, then by the clock, within a memory budget."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_dp.errors import InvalidValueError
from lightning_dp.gradients.layers import Use, Workspace

GradientMemory = Literal["speed", "balanced", "low"]

_ROUNDS = 2  # timed runs of each method, after one that makes its memory
_HOPELESS = 5.0  # times the best so far, from which a method is timed once only
_log = logging.getLogger(__name__)


class MethodChoice:
    """Remembers a method for each parameter and size.

    Args:
        memory: What may be held from the norms to the sum: ``"speed"`` anything, ``"low"`` nothing,
            ``"balanced"`` as much as the inputs and output gradients of the layers take, or a number of bytes.
        pinned: Methods by name of the parameter, which are not timed. Sizes for which a method does not exist take
            another one.
    """

    def __init__(self, memory: GradientMemory | int, pinned: Mapping[str, str]) -> None:
        self.memory, self.pinned = memory, dict(pinned)
        self._learned: dict[tuple[str, int], str] = {}
        self._logged = False

    def method(self, name: str, use: Use) -> str:
        """The method for a parameter."""
        if len(use.methods) == 1:
            return use.methods[0]
        pinned = self.pinned.get(name)
        if pinned is not None and pinned not in use.all_methods:
            raise InvalidValueError(
                f"`gradient_methods` has {pinned!r} for `{name}`; it may be one of {', '.join(map(repr, use.methods))}."
            )
        if pinned in use.methods:
            return pinned
        return self._learned.get(_key(name, use)) or _frugal(use)

    def knows(self, name: str, use: Use) -> bool:
        """Whether nothing can be learned about this parameter at this size."""
        return len(use.methods) == 1 or self.pinned.get(name) in use.methods or _key(name, use) in self._learned

    def learn(self, uses: Mapping[str, Use], available: int) -> None:
        """Times every method and keeps the fastest set that fits into memory.

        Args:
            uses: By parameter; those that :meth:`knows` about are left as they are.
            available: Bytes that ``"balanced"`` stands for.
        """
        unknown = {name: use for name, use in uses.items() if not self.knows(name, use)}
        if not unknown:
            return
        named = {"speed": math.inf, "balanced": float(available), "low": 0.0}
        budget = named[self.memory] if isinstance(self.memory, str) else float(self.memory)
        known = sum(use.kept_bytes(self.method(name, use)) for name, use in uses.items() if name not in unknown)
        spare = max(0.0, budget - known - sum(use.kept_bytes(_frugal(use)) for use in unknown.values()))
        found: dict[object, dict[str, float]] = {}
        seconds = {}
        for name, use in unknown.items():
            alike = type(use), use.sizes, use.shape, use.records  # equal layers take equally long
            if alike not in found:
                found[alike] = _timed(use, spare)
            seconds[name] = found[alike]
        for name, method in _fastest(unknown, seconds, spare).items():
            self._learned[_key(name, unknown[name])] = method
        self._log_once({name: self.method(name, use) for name, use in uses.items() if len(use.methods) > 1})

    def _log_once(self, methods: dict[str, str]) -> None:
        if not self._logged:
            self._logged = True
            _log.info("Ways to the norms of gradients, to be pinned as `gradient_methods`: %s", methods)


def _key(name: str, use: Use) -> tuple[str, int]:
    """Sizes within a factor of two share a method, so that sequences of many lengths do not all have to be timed."""
    return name, round(math.log2(max(1, use.sizes[0])))


def _frugal(use: Use) -> str:
    """The first method that keeps least."""
    return min(use.methods, key=use.kept_bytes)


def _spared(use: Use, method: str) -> int:
    """Bytes that a method keeps beyond the least."""
    return use.kept_bytes(method) - use.kept_bytes(_frugal(use))


def _timed(use: Use, spare: float) -> dict[str, float]:
    """Seconds that each method takes for norms and sum, without those that keep too much more than the least."""
    total = torch.zeros(use.shape, dtype=use.dtype, device=use.device)
    weights = torch.ones(use.records, dtype=use.dtype, device=use.device)
    seconds: dict[str, float] = {}
    for method in use.methods:
        if _spared(use, method) <= spare:
            workspace, best = Workspace(), min(seconds.values(), default=math.inf)
            found = _clocked(use, method, workspace, total, weights)  # with new memory, and so too long
            rounds = _ROUNDS if found < _HOPELESS * best else 0
            seconds[method] = min([found, *(_clocked(use, method, workspace, total, weights) for _ in range(rounds))])
    return seconds


def _clocked(use: Use, method: str, workspace: Workspace, total: Tensor, weights: Tensor) -> float:
    if total.is_cuda:
        torch.cuda.synchronize(total.device)
    start = time.perf_counter()
    use.start(method, workspace)[1].add_to(total, weights, workspace)
    if total.is_cuda:
        torch.cuda.synchronize(total.device)
    return time.perf_counter() - start


def _fastest(uses: Mapping[str, Use], seconds: Mapping[str, Mapping[str, float]], spare: float) -> dict[str, str]:
    """Starts from methods that keep least and spends memory where a byte saves most time."""
    chosen = {}
    for name, use in uses.items():
        least = [method for method in seconds[name] if not _spared(use, method)]
        chosen[name] = min(least, key=seconds[name].__getitem__)
    upgrades = []
    for name, use in uses.items():
        for method, taken in seconds[name].items():
            size, saved = _spared(use, method), seconds[name][chosen[name]] - taken
            if size and saved > 0:
                upgrades.append((saved / size, name, method, size))
    for _, name, method, size in sorted(upgrades, reverse=True):
        if size <= spare and not _spared(uses[name], chosen[name]):
            chosen[name], spare = method, spare - size
    return chosen
