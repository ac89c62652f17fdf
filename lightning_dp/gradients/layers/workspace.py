"""Memory that is kept from step to step: fresh memory costs more than the arithmetic that fills it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CACHED_BYTES = 2**21  # what stays in the cache of one core between two operations
_LAUNCHED_BYTES = 2**28  # what is worth one launch on an accelerator


class Workspace:
    """Buffers by name, which grow to the largest size that was asked for and are never cleared."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """An uninitialised tensor, valid until the same name is asked for again.

        Args:
            name: What it is for.
            shape: Its shape.
            like: Gives type and device.
        """
        size, key = math.prod(shape), (name, like.dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(*shape)

    @property
    def bytes(self) -> int:
        """Memory that is held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Gives everything back."""
        self._buffers.clear()


def scratch_bytes(device: torch.device) -> int:
    """Memory that several operations in a row may share fast on a device."""
    return _CACHED_BYTES * torch.get_num_threads() if device.type == "cpu" else _LAUNCHED_BYTES


def pieces(records: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """Cuts a batch into runs of records that fit into the scratch memory of a device, one record at least.

    Args:
        records: Number of records.
        bytes_each: What is written for one record.
        device: Where.
    """
    size = max(1, scratch_bytes(device) // max(1, bytes_each))
    for first in range(0, records, size):
        yield slice(first, min(records, first + size))
