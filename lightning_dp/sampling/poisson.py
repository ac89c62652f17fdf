"""Exact Poisson sampling, in time that follows the batch and not the data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from lightning_dp import _validate
from lightning_dp.sampling.entropy import KeyStream


class ChunkIndices(NamedTuple):
    """Which records one physical batch holds.

    Attributes:
        update: Number of the logical batch; grows from one logical batch to the next.
        chunk: Number of the physical batch inside its logical batch, from 0.
        indices: Positions in the data set, possibly none.
    """

    update: int
    chunk: int
    indices: list[int]


class PoissonSampler(Sampler[ChunkIndices]):
    """Draws logical batches in which every record takes part independently with the same probability.

    The size of a batch is drawn from the binomial law and then that many distinct records are drawn uniformly, which
    is Poisson sampling exactly, without touching every record at every update. Each process draws the same selection
    from a shared key and takes every ``world_size``-th record of it, so that the union over the processes is the
    Poisson sample and all processes see the same number of physical batches.

    Args:
        num_records: Number of records in the data set.
        sampling_rate: Probability, in (0, 1], that a record takes part in one update.
        updates_per_epoch: Number of logical batches of one pass of the iterator.
        num_chunks: Number of physical batches into which every logical batch is cut.
        stream: Secret randomness, the same on all processes.
        rank: Which share this process takes.
        world_size: Number of processes.
        passes: Number of passes that were started on the same stream before, by another sampler.
    """

    def __init__(
        self,
        *,
        num_records: int,
        sampling_rate: float,
        updates_per_epoch: int,
        num_chunks: int = 1,
        stream: KeyStream,
        rank: int = 0,
        world_size: int = 1,
        passes: int = 0,
    ) -> None:
        self.num_records = _validate.integer("num_records", num_records, minimum=1)
        self.sampling_rate = _validate.probability("sampling_rate", sampling_rate)
        self.updates_per_epoch = _validate.integer("updates_per_epoch", updates_per_epoch, minimum=1)
        self.num_chunks = _validate.integer("num_chunks", num_chunks, minimum=1)
        self.rank, self.world_size = rank, world_size
        self._stream = stream
        self.passes = passes

    def selection(self, update: int) -> npt.NDArray[np.int64]:
        """The records of the logical batch number ``update``, over all processes; shape ``(size,)``, distinct."""
        generator = self._stream.generator(update)
        # PRIVACY: the size is random too; a fixed size would not be Poisson sampling, whatever is accounted.
        size = generator.binomial(self.num_records, self.sampling_rate)
        return generator.choice(self.num_records, size, replace=False, shuffle=False)

    def __iter__(self) -> Iterator[ChunkIndices]:
        # PRIVACY: no number is ever used twice, so no selection enters two updates: passes are counted when they
        # start, and an abandoned pass (early stop, loader workers that ran ahead) leaves its numbers unused.
        first = self.passes << 32
        self.passes += 1
        for update in range(first, first + self.updates_per_epoch):
            share = self.selection(update)[self.rank :: self.world_size]
            for chunk, indices in enumerate(np.array_split(share, self.num_chunks)):
                yield ChunkIndices(update, chunk, indices.tolist())

    def __len__(self) -> int:
        return self.updates_per_epoch * self.num_chunks
