"""The loader that replaces the user's: same records, workers and collate function, Poisson batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_dp.errors import UnsupportedDataError
from lightning_dp.sampling.null_record import null_record
from lightning_dp.sampling.poisson import ChunkIndices, PoissonSampler


class ChunkInfo(NamedTuple):
    """What the mechanism must know of a physical batch.

    Attributes:
        update: Number of its logical batch.
        chunk: Its number inside the logical batch, from 0.
        num_records: How many real records it holds; 0 if its only record is a null record.
    """

    update: int
    chunk: int
    num_records: int


class Chunk(NamedTuple):
    """A collated physical batch and what it holds."""

    batch: Any
    info: ChunkInfo


_SHOWN = 16  # rows that tell tensors apart


class ChunkDataset(Dataset[Chunk]):
    """Fetches and collates a whole physical batch at once; everything else is the wrapped data set's.

    Args:
        dataset: A map-style data set.
        collate_fn: Makes a batch of a list of records.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __getitem__(self, index: ChunkIndices) -> Chunk:
        info = ChunkInfo(index.update, index.chunk, len(index.indices))
        if index.indices and self.collate_fn is default_collate:
            tensors = _tensors_at(self.dataset, index.indices)
            if tensors is not None:
                return Chunk(tensors, info)
        # PRIVACY: an empty batch is filled with zeros, never with a real record that was not drawn.
        records = self._fetch(index.indices) if index.indices else [null_record(self.dataset[0])]
        return Chunk(self.collate_fn(records), info)

    def _fetch(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[i] for i in indices]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "collate_fn") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _tensors_at(dataset: Any, indices: list[int]) -> list[Tensor] | None:
    """What the default collate function makes of these records, read at once where they are rows of tensors."""
    if type(dataset) is Subset:
        return _tensors_at(dataset.dataset, [dataset.indices[i] for i in indices])
    if type(dataset) is not TensorDataset:
        return None
    chosen = torch.tensor(indices)
    return [tensor[chosen] for tensor in dataset.tensors]


class PrivateDataLoader(DataLoader[Any]):
    """A ``DataLoader`` over the chunks of a :class:`PoissonSampler`; yields batches as the user's loader does.

    Args:
        loader: The user's loader, whose data set, collate function, workers and memory settings are kept.
        sampler: Which records each physical batch holds.

    Attributes:
        chunks: The data set that fetches physical batches.
        info: What the batch handed out last holds, ``None`` before the first one.
    """

    def __init__(self, loader: DataLoader[Any], sampler: PoissonSampler) -> None:
        self.chunks = ChunkDataset(loader.dataset, loader.collate_fn)
        super().__init__(
            self.chunks,
            batch_size=None,
            sampler=sampler,
            collate_fn=_unchanged,  # type: ignore[arg-type]  # without batching it gets one chunk, not a list
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self.info: ChunkInfo | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for chunk in super().__iter__():
            self.info = chunk.info
            yield chunk.batch


def _unchanged(chunk: Chunk) -> Chunk:
    return chunk


def check_loader(loader: object) -> DataLoader[Any]:
    """Returns ``loader`` if its records can be sampled independently of each other.

    Raises:
        UnsupportedDataError: It is no map-style ``DataLoader`` with plain shuffled or sequential batches.
    """
    if not isinstance(loader, DataLoader):
        raise UnsupportedDataError(
            f"The training data comes from a `{type(loader).__qualname__}`. Private training draws its own batches"
            " and needs a `torch.utils.data.DataLoader` over a map-style data set."
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise UnsupportedDataError(
            f"`{type(dataset).__qualname__}` streams its records, so none can be drawn with a known probability."
            " Give a data set with `__len__` and `__getitem__`: load the stream into a list, or index its files."
        )
    if len(dataset) == 0:
        raise UnsupportedDataError(f"The training data set (`{type(dataset).__qualname__}`) is empty.")
    _check_sampler(loader)
    _check_repeats(dataset)
    return loader


def _check_sampler(loader: DataLoader[Any]) -> None:
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        name = "none" if loader.batch_sampler is None else f"`{type(loader.batch_sampler).__qualname__}`"
        raise UnsupportedDataError(
            f"The training loader forms its own batches (batch sampler: {name}), which cannot be accounted as Poisson"
            " sampling. Give `DataLoader(dataset, batch_size=...)` without `batch_sampler`."
        )
    sampler = loader.sampler
    plain = isinstance(sampler, (SequentialSampler, DistributedSampler)) or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not plain:
        raise UnsupportedDataError(
            f"The training loader uses `{type(sampler).__qualname__}`, which gives records unequal or unknown"
            " chances; private training draws every record with the same probability. Remove the sampler and use"
            " class weights in a per-record loss, `torch.utils.data.Subset`, or `PrivateStrategy(sampling_rate=...)`."
        )


def _check_repeats(dataset: Any) -> None:
    """Refuses a data set that holds a record twice: its share of an update would not be bounded by one clip norm."""
    if not isinstance(dataset, (Subset, ConcatDataset)):
        return
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else ():
        _check_repeats(part)
    origins = _origins(dataset)
    repeats = len(origins) - len(np.unique(origins, axis=0))
    if repeats:
        raise UnsupportedDataError(
            f"The training `{type(dataset).__name__}` lists {repeats} of its records more than once, so one record"
            " could enter an update several times. Remove the repeats, and join each data set once."
        )


def _origins(dataset: Any) -> npt.NDArray[np.int64]:
    """Where each record comes from through any nesting: the data set that holds it and its position, ``(N, 2)``."""
    if isinstance(dataset, Subset):
        # Negative positions count from the end, as they do for the data set itself.
        return _origins(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_origins(part) for part in dataset.datasets])
    return np.stack([np.full(len(dataset), id(dataset), dtype=np.int64), np.arange(len(dataset))], axis=1)


def fingerprint(dataset: Any) -> int:
    """A number that differs between data sets of which one can tell that they do not hold the same records in order.

    Sees sizes, what :class:`Subset` and :class:`ConcatDataset` choose and join, and some rows of a
    :class:`TensorDataset`; other data sets of one size look alike, since reading a record may alter it at random.
    """
    if isinstance(dataset, Subset):
        return zlib.crc32(np.asarray(dataset.indices, dtype=np.int64).tobytes(), fingerprint(dataset.dataset))
    if isinstance(dataset, ConcatDataset):
        return zlib.crc32(repr([fingerprint(part) for part in dataset.datasets]).encode())
    shown = b""
    if type(dataset) is TensorDataset:
        places = torch.linspace(0, len(dataset) - 1, _SHOWN).long()
        shown = repr([tensor[places].tolist() for tensor in dataset.tensors]).encode()
    return zlib.crc32(shown, len(dataset) % 2**32)
