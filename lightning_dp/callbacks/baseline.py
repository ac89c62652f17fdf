"""The same model without privacy, to see what privacy costs."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_dp import _compat, _validate
from lightning_dp.callbacks.console import say
from lightning_dp.errors import InvalidValueError, TrainerSettingsError
from lightning_dp.strategies.settings import is_fast_dev_run

_LIGHTNING_MESSAGES = logging.getLogger("lightning.pytorch.utilities.rank_zero")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the hints that Lightning has given already for the private run."""
    level = _LIGHTNING_MESSAGES.level
    _LIGHTNING_MESSAGES.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _LIGHTNING_MESSAGES.setLevel(level)


class NonPrivateBaseline(Callback):
    """Trains a copy of the model without privacy after the private run, and puts its metrics beside the private ones.

    The copy starts from the parameters that private training starts from and sees the same data, in ordinary batches
    of the loader's own size, without accumulation or gradient clipping. Its result is **not** private: it is for
    comparing on data that may be looked at, never for release.

    Args:
        metrics: Names of the logged validation metrics to compare.
        max_epochs: Epochs of the baseline; those of the private run if ``None``.
        hparams: Hyperparameters that a model without clipping and noise needs otherwise, such as the learning rate. The
            module is then built anew with these in place of its own; it must have called ``save_hyperparameters()``.

    Attributes:
        result: The metrics of the baseline, empty before it has run.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        *,
        max_epochs: int | None = None,
        hparams: dict[str, Any] | None = None,
    ) -> None:
        self.metrics = _validate.strings("metrics", metrics)
        if not self.metrics:
            raise InvalidValueError("`metrics` is empty; name a logged validation metric, such as ['val_acc'].")
        self.max_epochs = _validate.optional(_validate.integer, "max_epochs", max_epochs, minimum=1)
        self.hparams = dict(hparams or {})
        self.result: dict[str, float] = {}
        self._copy: LightningModule | None = None
        self._max_steps, self._is_endless = -1, False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        unknown = sorted(set(self.hparams) - set(pl_module.hparams))
        if unknown:
            raise TrainerSettingsError(
                f"`NonPrivateBaseline(hparams=...)` names {unknown}, which `{type(pl_module).__name__}` does not have."
                f" It has {sorted(map(str, pl_module.hparams))}; call `self.save_hyperparameters()` in its constructor."
            )
        self.result = {}
        self._max_steps = trainer.max_steps
        self._is_endless = self.max_epochs is None and trainer.max_epochs == -1 and trainer.max_steps == -1

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._copy = self._build(pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The sanity check before training is a validation too: a misspelt name costs no run.
        if trainer.state.fn == "fit":
            self._read(trainer.callback_metrics)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._copy is None or is_fast_dev_run(trainer):
            return
        if trainer.is_global_zero:
            say("Training the same model without privacy, for comparison only.")
        module, self._copy = self._copy, None
        with _quietly():
            plain = self._plain_trainer(trainer)
            plain.fit(module, **_compat.data_of(trainer))
            if not set(self.metrics) <= set(plain.callback_metrics):
                # It ended before the first validation.
                plain.validate(module, verbose=False, **_compat.data_of(trainer, fitting=False))
        if trainer.datamodule is not None:  # type: ignore[attr-defined]
            trainer.datamodule.trainer = trainer  # type: ignore[attr-defined]
        self.result = self._read(plain.callback_metrics)

    def _plain_trainer(self, trainer: Trainer) -> Trainer:
        return Trainer(
            accelerator=trainer.accelerator,
            devices=1,
            precision=trainer.precision,
            max_epochs=self.max_epochs or trainer.max_epochs,
            max_steps=trainer.global_step if self._is_endless else self._max_steps,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )

    def _build(self, module: LightningModule) -> LightningModule:
        if not self.hparams:
            return copy.deepcopy(module)
        # LightningCLI adds entries of its own, with a leading underscore.
        own = {name: value for name, value in module.hparams.items() if not str(name).startswith("_")}
        twin = type(module)(**{**own, **self.hparams})
        twin.load_state_dict(module.state_dict())
        return twin

    def _read(self, logged: Mapping[str, Any]) -> dict[str, float]:
        missing = [name for name in self.metrics if name not in logged]
        if missing:
            raise TrainerSettingsError(
                f"`NonPrivateBaseline(metrics=...)` names {missing}, which was not logged; there are {sorted(logged)}."
            )
        return {name: float(logged[name]) for name in self.metrics}
