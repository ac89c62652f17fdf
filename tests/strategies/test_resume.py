"""Runs that are taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from conftest import TrainerFactory
from fixtures import Lit, Recorder, make_loader
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

import lightning_dp
from lightning_dp import errors


class SavesAt(pl.Callback):
    """Saves a checkpoint after one physical batch."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any) -> None:
        if arguments[-1] + 1 == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("batch", range(1, 17))
def test_a_checkpoint_from_anywhere_in_an_epoch_resumes_at_the_last_whole_update(
    batch: int, make_private_trainer: TrainerFactory, tmp_path: Path
) -> None:
    """Two epochs of four updates of four physical batches."""
    path = tmp_path / "middle.ckpt"
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 2}
    make_private_trainer(callbacks=[SavesAt(batch, path)], **settings).fit(Lit(), make_loader(4))
    recorder = Recorder()
    resumed = make_private_trainer(callbacks=[recorder], **settings)
    resumed.fit(Lit(), make_loader(4), ckpt_path=str(path))
    assert resumed.global_step == resumed.strategy.ledger.num_updates == 8
    assert len(recorder.batches) == 4 * (8 - batch // 4)


class FailsOnce(Lit):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            raise KeyError("out of memory, say")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path=")
@pytest.mark.parametrize("at", [5, 6, 8])
def test_a_run_that_failed_inside_an_update_resumes_from_its_exception_checkpoint(
    at: int, make_private_trainer: TrainerFactory, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_epochs": 1}
    failing = make_private_trainer(callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True, **settings)
    with pytest.raises(KeyError):
        failing.fit(FailsOnce(at), make_loader(4))
    resumed = make_private_trainer(**settings)
    resumed.fit(Lit(), make_loader(4), ckpt_path=str(tmp_path / "on_exception.ckpt"))
    assert resumed.global_step == resumed.strategy.ledger.num_updates == 4


def test_what_a_checkpoint_spent_is_known_after_validating_it(
    make_private_trainer: TrainerFactory, make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    class Validated(Lit):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            self.log("val_mean", self(batch[0]).mean())

    trained = make_private_trainer()
    trained.fit(Lit(), make_loader())
    trained.save_checkpoint(tmp_path / "done.ckpt")
    reader = make_trainer(strategy="private", callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5)])
    reader.validate(Validated(), make_loader(shuffle=False), ckpt_path=str(tmp_path / "done.ckpt"), verbose=False)
    assert reader.strategy.guarantee.epsilon == trained.strategy.guarantee.epsilon


def test_a_checkpoint_with_more_than_plain_values_is_refused_with_a_way_out(
    make_private_trainer: TrainerFactory, tmp_path: Path
) -> None:
    class WithPath(Lit):
        def __init__(self, folder: Path) -> None:
            super().__init__()
            self.save_hyperparameters()

    trained = make_private_trainer()
    trained.fit(WithPath(tmp_path), make_loader())
    trained.save_checkpoint(tmp_path / "done.ckpt")
    later = make_private_trainer(strategy={"previous_checkpoints": [str(tmp_path / "done.ckpt")]})
    with pytest.raises(errors.LedgerError, match="add_safe_globals"):
        later.fit(Lit(), make_loader())
