"""Synthetic records, made once from a fixed seed, and the loader that all variants share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_dp.sampling import KeyStream, PoissonSampler, insecure_key
from workloads.catalog import Workload

SEED = 20_240_229
_DISTINCT = 4  # batches of records that are really there


class _Batch(NamedTuple):
    inputs: Tensor
    labels: Tensor


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Records that share the memory of a few, and are fetched a batch at a time.

    Args:
        draw: Makes the inputs of so many records.
        distinct: How many of them differ.
        count: How many there are.
        classes: Number of labels.
    """

    def __init__(self, draw: Callable[[int], Tensor], *, distinct: int, count: int, classes: int) -> None:
        torch.manual_seed(SEED)
        self.inputs, self.labels = draw(distinct), torch.randint(classes, (distinct,))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index % len(self.inputs)], self.labels[index % len(self.labels)]

    def __getitems__(self, indices: list[int]) -> list[_Batch]:
        """All records of a batch in one go: a loop over them would hide what the update costs."""
        rows = torch.tensor(indices) % len(self.inputs)
        return [_Batch(self.inputs[rows], self.labels[rows])]


def _join(fetched: list[Any]) -> Any:
    return tuple(fetched[0]) if isinstance(fetched[0], _Batch) else default_collate(fetched)


class _SameBatches(PoissonSampler):
    """The batches that this library draws from its insecure seed, for a plain loader."""

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return (chunk.indices for chunk in super().__iter__() if chunk.indices)


def poisson_loader(workload: Workload, *, batches: int = 64) -> DataLoader[Any]:
    """What :func:`loader` gives, in the very batches that a private strategy with :data:`SEED` draws from it."""
    plain = loader(workload, batches=batches)
    sampler = _SameBatches(
        num_records=len(plain.dataset),  # type: ignore[arg-type]
        sampling_rate=1 / batches,
        updates_per_epoch=batches,
        stream=KeyStream(insecure_key(SEED, 1), "sampling"),
    )
    return DataLoader(plain.dataset, batch_sampler=sampler, collate_fn=_join)  # type: ignore[arg-type]


def loader(workload: Workload, *, batches: int = 64) -> DataLoader[Any]:
    """Shuffled batches of the workload's size, without the last one if it is short.

    Args:
        workload: What is trained.
        batches: Batches of an epoch, which fixes the number of records.
    """
    count = batches * workload.batch
    distinct = min(count, _DISTINCT * workload.batch)
    records = Records(workload.draw, distinct=distinct, count=count, classes=workload.classes)
    return DataLoader(records, batch_size=workload.batch, shuffle=True, drop_last=True, collate_fn=_join)
