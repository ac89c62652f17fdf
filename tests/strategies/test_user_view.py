"""Small things that a user relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from torch import Tensor

import lightning_dp
from lightning_dp import errors


class SetsStateInHooks(Lit):
    """Creates in its own hooks what its training step needs."""

    def on_train_start(self) -> None:
        self.scale = torch.tensor(2.0)

    def on_train_epoch_start(self) -> None:
        self.shift = torch.tensor(1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.power = 1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(((batch[0] * self.scale + self.shift) ** self.power, batch[1]), batch_idx)


@pytest.mark.parametrize("monitored", [True, False])
def test_training_hooks_of_the_module_run_before_its_step_is_tried(
    monitored: bool, make_private_trainer: TrainerFactory
) -> None:
    callbacks = [lightning_dp.PrivacyMonitor(delta=1e-5, statement=False)] if monitored else []
    trainer = make_private_trainer(callbacks=callbacks)
    trainer.fit(SetsStateInHooks(), make_loader())
    assert trainer.strategy.ledger.num_updates == 8


def test_the_noise_that_was_found_can_be_read(make_trainer: TrainerFactory) -> None:
    budget = lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5, statement=False)
    trainer = make_trainer(strategy="private", callbacks=[budget])
    assert trainer.strategy.noise_multiplier is None
    trainer.fit(Lit(), make_loader())
    expected = lightning_dp.calibrate_noise_multiplier(epsilon=3, delta=1e-5, sampling_rate=0.25, num_updates=8)
    assert trainer.strategy.noise_multiplier == expected
    assert lightning_dp.PrivateStrategy(noise_multiplier=2.5).noise_multiplier == 2.5


def test_two_nodes_are_refused(make_private_trainer: TrainerFactory) -> None:
    with pytest.raises(errors.TrainerSettingsError, match="num_nodes=2"):
        make_private_trainer(num_nodes=2).fit(Lit(), make_loader())


def test_a_guarantee_without_a_delta_says_where_to_give_one() -> None:
    with pytest.raises(errors.InvalidValueError, match=r"strategy\.ledger\.guarantee"):
        _ = lightning_dp.PrivateStrategy(noise_multiplier=1.0).guarantee


def test_half_precision_keeps_privacy(make_private_trainer: TrainerFactory) -> None:
    """Sums and noise are float32; the released gradient is rounded to the parameter's type afterwards."""
    trainer = make_private_trainer(precision="bf16-mixed")
    trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.num_updates == 8
