"""The comparison without privacy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from torch import Tensor, nn

import lightning_dp
from lightning_dp import errors


class Tunable(Lit):
    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"])


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("as_datamodule", [True, False])
def test_the_result_is_that_of_a_plain_trainer(
    as_datamodule: bool, make_private_trainer: TrainerFactory, make_trainer: TrainerFactory
) -> None:
    """Full-batch gradient descent without privacy has no randomness: the same loss to the last digits."""

    def data() -> dict[str, Any]:
        train, val = make_loader(64, shuffle=False), make_loader(64, shuffle=False)
        if not as_datamodule:
            return {"train_dataloaders": train, "val_dataloaders": val}
        module = pl.LightningDataModule()
        module.train_dataloader, module.val_dataloader = lambda: train, lambda: val  # type: ignore[method-assign]
        return {"datamodule": module}

    start = Tunable().state_dict()
    baseline = lightning_dp.NonPrivateBaseline(["val_loss"], max_epochs=5, hparams={"learning_rate": 0.7})
    private = Tunable()
    private.load_state_dict(start)
    trainer = make_private_trainer(callbacks=[baseline], max_epochs=1)
    trainer.fit(private, **data())

    plain = Tunable(learning_rate=0.7)
    plain.load_state_dict(start)
    expected = make_trainer(max_epochs=5)
    expected.fit(plain, **data())
    assert baseline.result["val_loss"] == pytest.approx(float(expected.callback_metrics["val_loss"]), rel=1e-5)
    assert trainer.strategy.ledger.num_updates == 1, "the baseline is no release of the private run"
    assert private.trainer is trainer


def test_hyperparameters_that_the_module_does_not_have_are_refused(make_private_trainer: TrainerFactory) -> None:
    baseline = lightning_dp.NonPrivateBaseline(["val_loss"], hparams={"lr": 0.7})
    with pytest.raises(errors.TrainerSettingsError, match="learning_rate"):
        make_private_trainer(callbacks=[baseline]).fit(Tunable(), make_loader(), make_loader())


@pytest.mark.parametrize("metrics", [[], "val_loss"])
def test_metrics_must_be_a_list_of_names(metrics: Any) -> None:
    with pytest.raises(errors.InvalidValueError, match="metrics"):
        lightning_dp.NonPrivateBaseline(metrics)


def test_a_misspelt_metric_is_found_before_training(make_private_trainer: TrainerFactory) -> None:
    baseline = lightning_dp.NonPrivateBaseline(["val_lss"])
    trainer = make_private_trainer(callbacks=[baseline])
    with pytest.raises(errors.TrainerSettingsError, match=r"val_lss.*val_loss"):
        trainer.fit(Tunable(), make_loader(), make_loader(shuffle=False))
    assert trainer.strategy.ledger.num_updates == 0


def test_the_baseline_of_an_endless_run_ends_with_it(make_private_trainer: TrainerFactory) -> None:
    baseline = lightning_dp.NonPrivateBaseline(["val_loss"])
    budget = lightning_dp.PrivacyBudget(epsilon=6, delta=1e-5, statement=False)
    trainer = make_private_trainer(callbacks=[budget, baseline], max_epochs=-1)
    trainer.fit(Tunable(), make_loader(), make_loader(shuffle=False))
    assert set(baseline.result) == {"val_loss"}
