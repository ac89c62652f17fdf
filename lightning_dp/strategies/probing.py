"""Runs the probe of the model on the first records, through the user's own collate function and transfer hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp import _compat
from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients import IndependenceProbe
from lightning_dp.gradients.probe import NUM_RECORDS
from lightning_dp.strategies.run import PrivateRun

_TOLERANCE, _BFLOAT_TOLERANCE = 1e-4, 5e-2


def probe_module(module: LightningModule, run: PrivateRun) -> None:
    """Checks on a copy of ``module`` that one record's gradient depends on that record alone.

    Raises:
        UnsupportedModelError: It does not; the message names the parameter or module, the reason and the remedy.
    """
    trainer, chunks = module.trainer, run.loader.chunks
    # Fetched once: a data set that augments gives another record each time.
    records = [chunks.dataset[i] for i in range(min(run.plan.num_records, NUM_RECORDS))]

    def loss(replica: LightningModule, batch_records: list[Any]) -> Tensor:
        batch = _compat.transfer(module, chunks.collate_fn(batch_records))
        with trainer.precision_plugin.train_step_context():
            output = replica.training_step(*_compat.training_step_arguments(trainer, batch))
        value = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(value, Tensor):
            raise UnsupportedModelError(
                f"`training_step` returned {type(value).__name__}; it must return a loss, as a tensor or in a"
                " dictionary, for every batch."
            )
        return value

    tolerance = _BFLOAT_TOLERANCE if "bf16" in str(trainer.precision) else _TOLERANCE
    usual_size = max(1, round(run.plan.expected_batch_size / run.plan.num_chunks / run.plan.world_size))
    IndependenceProbe(module, loss=loss, tolerance=tolerance, usual_size=usual_size).run(records)
