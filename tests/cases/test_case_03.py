"""Case 03: classes of `pytorch_lightning` do not mix with those of `lightning.pytorch`, and one error says so."""

import pytest
import pytorch_lightning as other
import torch
from fixtures import Lit, LitData, make_loader

import lightning_dp


class OtherLit(other.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherData(other.LightningDataModule):
    def train_dataloader(self):
        return make_loader()


class LitWithLoader(Lit):
    def train_dataloader(self):
        return make_loader()


def other_trainer(path, **settings):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return other.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=path, **quiet, **settings)


def assert_names_both(error):
    assert "pytorch_lightning" in str(error.value)
    assert "lightning.pytorch" in str(error.value)


def test_trainer_of_the_other_package_with_the_strategys_name(tmp_path):
    budget = lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)
    with pytest.raises(Exception) as error:  # noqa: PT011 - which type it is does not matter
        other_trainer(tmp_path, strategy="private", callbacks=[budget])
    assert_names_both(error)


def test_trainer_of_the_other_package_with_a_strategy_object(tmp_path):
    strategy = lightning_dp.PrivateStrategy(noise_multiplier=1.0)
    with pytest.raises(Exception) as error:  # noqa: PT011
        other_trainer(tmp_path, strategy=strategy).fit(OtherLit(), make_loader())
    assert_names_both(error)


def test_trainer_of_the_other_package_with_a_callback_only(tmp_path):
    trainer = other_trainer(tmp_path, callbacks=[lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)])
    with pytest.raises(Exception) as error:  # noqa: PT011
        trainer.fit(OtherLit(), make_loader())
    assert_names_both(error)


def test_data_module_of_the_other_package(make_private_trainer):
    with pytest.raises(Exception) as error:  # noqa: PT011
        make_private_trainer().fit(Lit(), datamodule=OtherData())
    assert_names_both(error)


def test_module_of_the_other_package(make_private_trainer):
    with pytest.raises(Exception) as error:  # noqa: PT011
        make_private_trainer().fit(OtherLit(), make_loader())
    assert_names_both(error)


@pytest.mark.parametrize(
    ("module", "data"),
    [
        (LitWithLoader, {}),
        (Lit, {"datamodule": LitData}),
        (Lit, {"train_dataloaders": make_loader}),
    ],
    ids=["hook", "datamodule", "argument"],
)
def test_loader_may_come_from_anywhere(make_private_trainer, module, data):
    trainer = make_private_trainer()
    trainer.fit(module(), **{name: make() for name, make in data.items()})
    assert trainer.strategy.ledger.num_updates == 8
