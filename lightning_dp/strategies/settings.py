"""Refuses, before data is touched, what cannot be combined with private training; each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_dp.errors import TrainerSettingsError, UnsupportedModelError
from lightning_dp.gradients import check_layers

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def check_trainer(trainer: Trainer) -> None:
    """Checks the settings of the Trainer and its callbacks.

    Raises:
        TrainerSettingsError: A setting is not supported.
    """
    _check_precision(trainer)
    overfit_batches: float = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit_batches > 0:
        raise TrainerSettingsError(
            f"`overfit_batches={overfit_batches}` repeats the same batches, which is not Poisson sampling."
            " Give `torch.utils.data.Subset(dataset, ...)` to the loader to train on fewer records."
        )
    for kind, reason in _REFUSED_CALLBACKS.items():
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, kind):
                raise TrainerSettingsError(f"`{type(callback).__name__}` {reason}")


_REFUSED_CALLBACKS = {
    GradientAccumulationScheduler: "changes how many batches form one update while training runs, and with it the"
    " sampling rate. Fix `Trainer(accumulate_grad_batches=...)`.",
    BatchSizeFinder: "tries batch sizes on private records, which nothing accounts for. Choose `batch_size` for memory"
    " and `accumulate_grad_batches` for the size of an update.",
    LearningRateFinder: "tries learning rates on private records and keeps only the best. Choose the learning rate on"
    " public data.",
}


def _check_precision(trainer: Trainer) -> None:
    precision = str(trainer.precision)
    if precision in _PRECISIONS:
        return
    reason = (
        "scales the loss, so that norms are multiplied by the scale before they are clipped, and skips updates"
        " depending on the data"
        if precision == "16-mixed"
        else "is not known to keep the norm of one record exact"
    )
    raise TrainerSettingsError(
        f"`precision={precision!r}` {reason}. Use one of {', '.join(map(repr, _PRECISIONS))}; sums, norms and noise are"
        " kept in float32 at least."
    )


def check_endless(trainer: Trainer) -> None:
    """Refuses a run without end whose noise is to be found from its number of updates."""
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise TrainerSettingsError(
            "`max_epochs=-1` without `max_steps` runs for ever (Lightning sets -1 when only `max_time` is given), so no"
            " noise multiplier can be found for its number of updates. Set `max_epochs` or `max_steps`, or fix"
            " `PrivateStrategy(noise_multiplier=...)`: then training stops when the budget is spent."
        )


def check_module(module: LightningModule) -> None:
    """Refuses layers that mix records, and a ``training_step`` that fetches its own batches.

    Raises:
        UnsupportedModelError: A layer is not supported; the message names its path.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedModelError(
            "`training_step(self, dataloader_iter)` fetches its own batches, so the records of an update are not known."
            " Take `batch` and `batch_idx` instead."
        )
    check_layers(module)


_SEVERAL_OPTIMIZERS = (
    "`configure_optimizers` returns {count} optimizers. Each of them would release the same batch once more than is"
    " accounted. Return one optimizer; it may have several parameter groups."
)


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Replaces Lightning's own error about several optimizers, which recommends what is refused here as well."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise TrainerSettingsError(_SEVERAL_OPTIMIZERS.format(count="several")) from None


def check_optimizers(optimizers: list[torch.optim.Optimizer], module: LightningModule) -> None:
    """Refuses several optimizers, optimizers that repeat the closure, and parameters outside the module.

    Raises:
        TrainerSettingsError: An optimizer is not supported.
        UnsupportedModelError: An optimizer holds parameters that are not the module's.
    """
    if len(optimizers) != 1:
        raise TrainerSettingsError(_SEVERAL_OPTIMIZERS.format(count=len(optimizers)))
    optimizer = optimizers[0]
    if not optimizer.param_groups:
        raise TrainerSettingsError(
            "`configure_optimizers` returns no optimizer, so every update would spend privacy and change nothing."
            " Return one."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainerSettingsError(
            "`LBFGS` evaluates the loss several times for one update, and each time is a release. Use an optimizer"
            " that evaluates it once, such as SGD or Adam."
        )
    known = {id(parameter) for parameter in module.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise UnsupportedModelError(
            f"The optimizer holds {len(foreign)} parameters that are not in `{type(module).__name__}.parameters()`"
            f" (shapes {shapes}); they would train on raw gradients. Register them: assign the module or"
            " `torch.nn.Parameter` to an attribute of the LightningModule."
        )


def updates_to_run(trainer: Trainer) -> int | None:
    """Updates that the Trainer has still to run; ``None`` if it has no end.

    Counted from where the loops stand and not from the total, since a resumed run may have other epochs than the one
    that wrote the checkpoint.
    """
    limits = []
    if trainer.max_steps != -1:
        limits.append(trainer.max_steps - trainer.global_step)
    if trainer.max_epochs is not None and trainer.max_epochs != -1:
        per_epoch = trainer.num_training_batches
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        epochs = trainer.max_epochs - trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        batches = epochs * per_epoch - (done if 0 < done < per_epoch else 0)
        limits.append(int(batches // trainer.accumulate_grad_batches))
    return max(0, min(limits)) if limits else None


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether this is a quick check of a few batches."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The settings that this package changes for a run, to be restored after it."""
    return {"max_steps": trainer.max_steps, "accumulate_grad_batches": trainer.accumulate_grad_batches}
