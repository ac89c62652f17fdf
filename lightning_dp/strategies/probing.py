"""Runs the probe of the model on the first records, through the user's own collate function and transfer hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp import _compat
from lightning_dp.errors import MixedRecordsError, UnsupportedModelError
from lightning_dp.gradients import IndependenceProbe
from lightning_dp.gradients.probe import NUM_RECORDS
from lightning_dp.strategies import loaders
from lightning_dp.strategies.run import PrivateRun

_TOLERANCE, _BFLOAT_TOLERANCE = 1e-4, 5e-2


class _LossFound(BaseException):
    """Ends ``training_step`` under manual optimization at its backward pass; no user code catches it."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def probe_module(module: LightningModule, run: PrivateRun, *, accept_mixed: bool = False) -> list[MixedRecordsError]:
    """Checks on a copy of ``module`` that one record's gradient depends on that record alone.

    Args:
        module: The user's module.
        run: Gives the engine and some records.
        accept_mixed: Return that it does not, instead of raising it.

    Raises:
        UnsupportedModelError: It does not; the message names the parameter or module, the reason and the remedy.
    """
    probe = IndependenceProbe(
        module,
        engine=run.make_engine,
        loss=loss_of_records(module, run),
        tolerance=_BFLOAT_TOLERANCE if "bf16" in str(module.trainer.precision) else _TOLERANCE,
        usual_size=run.usual_size,
        accept_mixed=accept_mixed,
    )
    # Fetched once: a data set that augments gives another record each time.
    probe.run(run.random_records(NUM_RECORDS))
    return probe.findings


def loss_of_records(module: LightningModule, run: PrivateRun) -> Callable[[LightningModule, list[Any]], Tensor]:
    """Runs ``training_step`` of a copy of ``module`` on records, collated and transferred as in training."""
    trainer, collate = module.trainer, run.loader.chunks.collate_fn
    beside = loaders.public_batches(trainer)

    def loss(replica: LightningModule, records: list[Any]) -> Tensor:
        batch = _compat.transfer(module, beside(collate(records)))
        with trainer.precision_plugin.train_step_context():
            return _loss_of(replica, _compat.training_step_arguments(trainer, batch))

    return loss


def _loss_of(replica: LightningModule, arguments: tuple[Any, ...]) -> Tensor:
    if not replica.automatic_optimization:
        object.__setattr__(replica, "manual_backward", _stop_at_loss)
    try:
        output = replica.training_step(*arguments)
    except _LossFound as found:
        return found.loss
    value = output["loss"] if isinstance(output, Mapping) and replica.automatic_optimization else output
    if not replica.automatic_optimization:
        raise UnsupportedModelError(
            "Under manual optimization `training_step` must run its backward pass by `self.manual_backward(loss)`;"
            " gradients of `loss.backward()` cannot be clipped."
        )
    if not isinstance(value, Tensor):
        raise UnsupportedModelError(
            f"`training_step` returned {type(value).__name__}; it must return a loss, as a tensor or in a"
            " dictionary, for every batch."
        )
    return value


def _stop_at_loss(loss: Tensor, *_: Any, **__: Any) -> None:
    raise _LossFound(loss)
