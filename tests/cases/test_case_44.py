"""Case 44: what chooses by looking at private rows is named, at the start and at the end."""

import pytest
import torch
from fixtures import Lit, make_loader, make_records
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

import lightning_dp


class Validated(Lit):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


class Reduced(Validated):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch"}}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss_epoch", loss, on_epoch=True, on_step=False)
        return loss


def words_of(make_private_trainer, capsys, module, callbacks, **settings):
    capsys.readouterr()
    trainer = make_private_trainer(callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5), *callbacks], **settings)
    trainer.fit(module, make_loader(), DataLoader(make_records(), 64))
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    opening, _, closing = printed.partition("Private training ended")
    return opening, closing


@pytest.mark.parametrize(
    ("module", "make_callbacks", "names"),
    [
        (Validated, lambda path: [ModelCheckpoint(path, monitor="val_loss")], ["ModelCheckpoint(monitor='val_loss')"]),
        (Validated, lambda path: [EarlyStopping("val_loss")], ["EarlyStopping(monitor='val_loss')"]),
        (Reduced, lambda path: [], ["ReduceLROnPlateau(monitor='train_loss_epoch')"]),
        (
            Reduced,
            lambda path: [EarlyStopping("val_loss"), ModelCheckpoint(path, monitor="val_loss")],
            [
                "EarlyStopping(monitor='val_loss')",
                "ModelCheckpoint(monitor='val_loss')",
                "ReduceLROnPlateau(monitor='train_loss_epoch')",
            ],
        ),
    ],
)
def test_unprotected_monitors_are_named_before_and_after(
    module, make_callbacks, names, make_private_trainer, capsys, tmp_path
):
    callbacks = make_callbacks(tmp_path)
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    for words in words_of(make_private_trainer, capsys, module(), callbacks, enable_checkpointing=checkpointing):
        assert f"choices by {', '.join(names)}: made on values without noise" in words


@pytest.mark.parametrize(
    "make_callbacks",
    [
        lambda path: [],
        lambda path: [ModelCheckpoint(path, every_n_train_steps=2)],
        lambda path: [ModelCheckpoint(path, monitor="privacy/epsilon", mode="max")],
    ],
    ids=["none", "by-step", "by-epsilon"],
)
def test_what_does_not_look_at_records_is_not_named(make_callbacks, make_private_trainer, capsys, tmp_path):
    callbacks = make_callbacks(tmp_path)
    for words in words_of(make_private_trainer, capsys, Validated(), callbacks, enable_checkpointing=bool(callbacks)):
        assert "choices by" not in words


def test_the_opening_statement_says_which_rows_are_covered(make_private_trainer, capsys):
    for words in words_of(make_private_trainer, capsys, Validated(), []):
        assert "covered the rows of the training data set, and no others" in words
