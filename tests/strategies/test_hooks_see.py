"""What user code can see while training runs, and what is left afterwards."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, attributes_of, make_loader
from torch import Tensor, nn

from lightning_dp import errors


class Spy(pl.Callback):
    def __init__(self) -> None:
        self.raw: list[str] = []
        self.noisy = 0

    def _look(self, hook: str, module: pl.LightningModule) -> None:
        for name, parameter in module.named_parameters():
            rows = getattr(parameter, "grad_sample", None)
            if parameter.grad is not None or rows is not None:
                self.raw.append(f"{hook}: {name}")

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object) -> None:
        for parameter in pl_module.parameters():
            assert getattr(parameter, "grad_sample", None) is None

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look("on_after_backward", pl_module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object) -> None:
        self.noisy += all(parameter.grad is not None for parameter in pl_module.parameters())


def test_no_hook_sees_a_raw_gradient(make_private_trainer: TrainerFactory) -> None:
    spy = Spy()
    make_private_trainer(callbacks=[spy], accumulate_grad_batches=2).fit(Lit(), make_loader(8))
    assert spy.raw == []
    assert spy.noisy == 8


class Failing(Lit):
    """Fails between a forward and a backward pass of its second batch, where layers hold private inputs."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 1:
            raise KeyError("the user's own mistake")
        return loss


def test_a_failed_run_leaves_nothing_on_the_module(make_private_trainer: TrainerFactory) -> None:
    module = Failing()
    clean = attributes_of(module)
    with pytest.raises(KeyError):
        make_private_trainer().fit(module, make_loader())
    assert attributes_of(module) == clean


def test_inplace_activations_come_back(make_private_trainer: TrainerFactory) -> None:
    module = Lit()
    module.net[1] = nn.ReLU(inplace=True)
    make_private_trainer().fit(module, make_loader())
    assert module.net[1].inplace is True


class Unfreezing(Lit):
    """Trains its last layer only, then both."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)


def test_a_layer_unfrozen_later_trains_on_clipped_gradients(make_private_trainer: TrainerFactory) -> None:
    """One update of the second epoch moves the layer by at most lr * N * C / E[B]; without clipping by far more."""
    module = Unfreezing()
    module.net[0].requires_grad_(False)
    weights = [module.net[0].weight.clone()]
    trainer = make_private_trainer(
        strategy={"noise_multiplier": 0.0, "max_grad_norm": 1e-4},
        max_epochs=2,
        callbacks=[
            pl.callbacks.LambdaCallback(on_train_epoch_end=lambda *_: weights.append(module.net[0].weight.clone()))
        ],
    )
    trainer.fit(module, make_loader())
    assert torch.equal(weights[0], weights[1])
    moved = float((weights[2] - weights[1]).detach().norm())
    assert 0 < moved <= 4 * 0.1 * 64 * 1e-4 / 16


class Twice(Lit):
    """Adds up two losses with two backward passes, in manual optimization."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.passes = passes

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(self.passes):
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()


def test_manual_optimization_with_one_backward_pass_is_booked_like_any_other(
    make_private_trainer: TrainerFactory,
) -> None:
    trainer = make_private_trainer()
    trainer.fit(Twice(1), make_loader())
    assert trainer.global_step == trainer.strategy.ledger.num_updates == 8


def test_a_second_backward_pass_on_one_batch_is_refused(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer()
    with pytest.raises(errors.PrivacyViolationError, match="second backward pass"):
        trainer.fit(Twice(2), make_loader())
    assert trainer.strategy.ledger.num_updates == 0


class SkipsTheStep(Twice):
    """Never takes the optimizer step that releases what its backward pass has added up."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))


def test_a_batch_that_is_added_up_but_not_released_cannot_enter_the_next_update(
    make_private_trainer: TrainerFactory,
) -> None:
    with pytest.raises(errors.PrivacyViolationError, match="left out or repeated"):
        make_private_trainer().fit(SkipsTheStep(1), make_loader())


class Repeating(torch.optim.SGD):
    """Evaluates the loss twice a step, as sharpness-aware minimisation does."""

    def step(self, closure):  # type: ignore[override, no-untyped-def]
        closure()
        return super().step(closure)


def test_an_optimizer_that_evaluates_the_loss_twice_is_stopped(make_private_trainer: TrainerFactory) -> None:
    module = Lit()
    module.configure_optimizers = lambda: Repeating(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    trainer = make_private_trainer()
    with pytest.raises(errors.PrivacyViolationError):
        trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates <= 1


def test_an_optimizer_with_parameters_outside_the_module_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = Lit()
    hidden = [nn.Parameter(torch.zeros(3))]
    module.configure_optimizers = lambda: torch.optim.SGD([*module.parameters(), *hidden], lr=0.1)  # type: ignore[method-assign]
    with pytest.raises(errors.UnsupportedModelError, match="raw gradients"):
        make_private_trainer().fit(module, make_loader())
