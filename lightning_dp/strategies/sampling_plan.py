"""The declared constants of a run: they are computed once and never again from the length of a loader."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lightning_dp import _validate
from lightning_dp.errors import InvalidValueError


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How the records of an update are drawn.

    Attributes:
        num_records: Number of records in the data set.
        public_size: The size that is treated as public and from which everything else follows.
        is_size_declared: Whether ``public_size`` was given by the user and hides ``num_records``.
        sampling_rate: Probability that a record takes part in one update.
        num_chunks: Physical batches of one update and process.
        world_size: Number of processes.
        updates_per_epoch: Updates of one epoch.
    """

    num_records: int
    public_size: int
    is_size_declared: bool
    sampling_rate: float
    num_chunks: int
    world_size: int
    updates_per_epoch: int

    @property
    def expected_batch_size(self) -> float:
        """Expected number of records of one update over all processes, by which the noisy sum is divided."""
        # PRIVACY: from the public size; dividing by the true one would let anyone read it off a noisy gradient.
        return self.sampling_rate * self.public_size


def plan_sampling(
    loader: DataLoader[Any],
    *,
    num_chunks: int,
    world_size: int,
    sampling_rate: float | None,
    public_size: int | None,
) -> SamplingPlan:
    """Reads the constants of a run off the user's loader.

    Args:
        loader: The user's loader; its ``batch_size`` is, as in Lightning, per process and physical batch.
        num_chunks: ``accumulate_grad_batches``.
        world_size: Number of processes.
        sampling_rate: Overrides ``batch_size * num_chunks * world_size / N``.
        public_size: Overrides the true N, to hide it.

    Raises:
        InvalidValueError: The batch is larger than the data set.
    """
    num_records = len(loader.dataset)  # type: ignore[arg-type]
    size = num_records if public_size is None else _validate.integer("public_size", public_size, minimum=1)
    if sampling_rate is not None:
        rate = _validate.probability("sampling_rate", sampling_rate)
        updates = max(1, math.ceil(1 / rate - 1e-9))
    else:
        batch = _validate.integer("batch_size", loader.batch_size, minimum=1) * num_chunks * world_size
        if batch > size:
            raise InvalidValueError(
                f"One update takes `batch_size` * `accumulate_grad_batches` * processes = {loader.batch_size} *"
                f" {num_chunks} * {world_size} = {batch} records, but the data set has {size}. Lower `batch_size`; with"
                f" {size} records an update, every record takes part in every one."
            )
        rate = batch / size
        updates = max(1, size // batch) if loader.drop_last else -(-size // batch)
    return SamplingPlan(
        num_records=num_records,
        public_size=size,
        is_size_declared=public_size is not None,
        sampling_rate=rate,
        num_chunks=num_chunks,
        world_size=world_size,
        updates_per_epoch=updates,
    )
