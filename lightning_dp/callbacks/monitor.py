"""Shows what training has spent: in the progress bar, in the logs, and in a statement before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from lightning_dp import _packages, _validate
from lightning_dp.callbacks.console import Statement, show
from lightning_dp.callbacks.statement import closing_statement, opening_statement
from lightning_dp.errors import TrainerSettingsError
from lightning_dp.strategies import PrivacyPolicy, PrivateMechanism

EPSILON_KEY = "privacy/epsilon"
CLIP_NORM_KEY = "privacy/clip_norm"


class PrivacyMonitor(Callback, PrivacyPolicy):
    """Logs ``privacy/epsilon`` after every update and prints a statement when training starts and ends.

    Where the clip norm moves, it logs ``privacy/clip_norm``, too.

    Epsilon is what has been spent at ``delta`` by everything in the ledger, add/remove adjacency.

    Args:
        delta: In (0, 1), and below one over the number of records.
        statement: Whether to print the statements.
        metrics: Names of the logged metrics that the closing statement shows; all that start with ``val`` if ``None``.

    Example:
        >>> import lightning_dp as ldp
        >>> callback = ldp.PrivacyMonitor(delta=1e-5)
    """

    def __init__(self, delta: float, *, statement: bool = True, metrics: Sequence[str] | None = None) -> None:
        _packages.watch_for_other_package()
        self.delta = _validate.delta(delta)
        self.statement = _validate.flag("statement", statement)
        self.metrics = None if metrics is None else _validate.strings("metrics", metrics)
        self._started = False

    @property
    @override
    def reporting_delta(self) -> float:
        return self.delta

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _packages.check_package(trainer)
        # PRIVACY: with another strategy nothing is private, however many of these callbacks there are.
        if stage == "fit" and not isinstance(trainer.strategy, PrivateMechanism):
            raise TrainerSettingsError(
                f"`{type(self).__name__}` is in the callbacks, but the strategy is `{type(trainer.strategy).__name__}`,"
                " which trains without privacy. Use `Trainer(strategy='private')`."
            )
        self._started = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = _strategy(trainer)
        strategy.prepare_run()
        self._started = True
        self._show(opening_statement(trainer, strategy))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.barebones:
            return
        strategy = _strategy(trainer)
        spent = strategy.ledger.epsilon(self.delta)
        pl_module.log(EPSILON_KEY, spent, prog_bar=True, on_step=True, on_epoch=False, rank_zero_only=True)
        clipping = strategy.run.clipping
        if clipping.rule.is_adaptive:
            pl_module.log(CLIP_NORM_KEY, clipping.max_norm, on_step=True, on_epoch=False, rank_zero_only=True)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close(trainer, exception)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Not empty, so that a Trainer that resumes the checkpoint without this callback warns about it.
        return {"delta": self.delta}

    def _close(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        if self._started:
            self._started = False
            self._show(closing_statement(trainer, _strategy(trainer), metrics=self.metrics, exception=exception))

    @rank_zero_only
    def _show(self, statement: Statement) -> None:
        if self.statement:
            show(statement)


def _strategy(trainer: Trainer) -> PrivateMechanism:
    assert isinstance(trainer.strategy, PrivateMechanism)
    return trainer.strategy
