"""What can go wrong after the probe has passed, and is stopped before anything raw is released."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dp
from lightning_dp import errors

HUGE_NOISE = {"noise_multiplier": 1e6}


class UnfreezesInside(Lit):
    """Unfreezes its first layer in the middle of a step, and freezes it again after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(self.global_step >= 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].requires_grad_(False)


class SwitchesBatchNormOn(Lit):
    """Freezes batch norm properly, then calls ``train()`` on everything, as image loggers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(3).requires_grad_(False).eval())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.train()


class CollectsStatistics(Lit):
    """Starts to average its inputs in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            self.center.mul_(0.9).add_(batch[0].mean(0))
        return super().training_step(batch, batch_idx)


class WritesIntoWeights(Lit):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            with torch.no_grad():
                self.net[2].bias.add_(1.0)
        return super().training_step(batch, batch_idx)


class LossOfAPart(Lit):
    """From the second epoch on, a second loss looks at one class only."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 1:
            loss = loss + self.net(x[y == 2]).square().sum() / len(x)
        return loss


class WatchedLater(Lit):
    """A tool asks to see its gradients once training runs."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].weight.register_hook(lambda gradient: gradient)


class AddsParametersLater(Lit):
    """Gives its optimizer parameters that are not the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Parameter(torch.zeros(3))]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": self.hidden})

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self.hidden[0] * batch[0].mean()).sum()


LATE_FAULTS: dict[str, tuple[Callable[[], Lit], str]] = {
    "unfreezes a layer inside the step": (UnfreezesInside, r"`net\.0\.\w+` was frozen or unfrozen"),
    "switches batch norm on": (SwitchesBatchNormOn, r"`net\.3`.*mixes the records"),
    "collects statistics": (CollectsStatistics, "`center` was changed"),
    "writes into a weight": (WritesIntoWeights, r"`net\.2\.bias` was changed"),
    "takes a loss of a part of the batch": (LossOfAPart, "rows for"),
    "is watched": (WatchedLater, r"`net\.0\.weight` has a gradient hook"),
    "adds parameters to the optimizer": (AddsParametersLater, "not in `AddsParametersLater.parameters"),
}


@pytest.mark.filterwarnings("ignore:Found 1 module")
@pytest.mark.parametrize(("make_module", "message"), LATE_FAULTS.values(), ids=LATE_FAULTS.keys())
def test_a_module_that_turns_bad_later_is_stopped(
    make_module: Callable[[], Lit], message: str, make_private_trainer: TrainerFactory
) -> None:
    module = make_module()
    trainer = make_private_trainer(strategy=HUGE_NOISE, max_epochs=3)
    with pytest.raises(errors.UnsupportedModelError, match=message):
        trainer.fit(module, make_loader())
    assert 1 <= trainer.strategy.ledger.num_updates <= 5


class FreezesInsideAnUpdate(Lit):
    """Freezes its first layer between two batches of one update."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 1)


def test_a_layer_frozen_between_batches_of_one_update_is_refused(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(accumulate_grad_batches=2)
    with pytest.raises(errors.UnsupportedModelError, match="between two batches of one update"):
        trainer.fit(FreezesInsideAnUpdate(), make_loader())


def test_parameters_added_to_the_optimizer_are_not_moved_by_raw_gradients(make_private_trainer: TrainerFactory) -> None:
    module = AddsParametersLater()
    with pytest.raises(errors.UnsupportedModelError):
        make_private_trainer().fit(module, make_loader())
    assert module.hidden[0].tolist() == [0, 0, 0]


def test_an_embedding_that_rescales_what_it_looks_up_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = Lit()
    module.net[0] = nn.Embedding(10, 16, max_norm=1.0)
    with pytest.raises(errors.UnsupportedModelError, match=r"`net\.0` \(Embedding\) has `max_norm`"):
        make_private_trainer().fit(module, make_loader())


class ClassWeights(Lit):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 50.0, 50.0]))


def test_records_sorted_by_class_do_not_hide_a_loss_that_ties_them(make_private_trainer: TrainerFactory) -> None:
    """16 random records of 96 are of one class with probability below 1e-6; the first 16 all are."""
    features, labels = torch.randn(96, 8), torch.arange(3).repeat_interleave(32)
    loader = DataLoader(TensorDataset(features, labels), batch_size=16, shuffle=True)
    with pytest.raises(errors.UnsupportedModelError, match="gradient of one record"):
        make_private_trainer().fit(ClassWeights(), loader)


class ByHand(Lit):
    """Manual optimization with a given loss and a given way to step."""

    def __init__(self, loss: Callable[..., Tensor] = F.cross_entropy, bare: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.loss, self.bare = loss, bare

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        (optimizer.optimizer if self.bare and self.global_step else optimizer).step()


def test_manual_optimization_is_probed_too(make_private_trainer: TrainerFactory) -> None:
    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 50.0, 50.0]))

    trainer = make_private_trainer()
    with pytest.raises(errors.UnsupportedModelError, match="gradient of one record"):
        trainer.fit(ByHand(weighted), make_loader())
    assert trainer.strategy.ledger.num_updates == 0


def test_a_step_of_the_bare_optimizer_is_refused_and_moves_nothing(make_private_trainer: TrainerFactory) -> None:
    module, states = ByHand(bare=True), []

    class Spy(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            states.append({name: value.clone() for name, value in pl_module.state_dict().items()})

    with pytest.raises(errors.PrivacyViolationError, match="bare optimizer"):
        make_private_trainer(callbacks=[Spy()]).fit(module, make_loader())
    assert all(torch.equal(value, states[-1][name]) for name, value in module.state_dict().items())


class Interrupted(Lit):
    """Is interrupted in the middle of its second backward pass."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        hidden = self.net[1](self.net[0](batch[0]))
        if self.global_step == 1:
            hidden.register_hook(self._interrupt)
        return F.cross_entropy(self.net[2](hidden), batch[1])

    def _interrupt(self, _: Tensor) -> None:
        raise ValueError("interrupted")


def test_an_interrupted_backward_pass_leaves_no_gradient(make_private_trainer: TrainerFactory) -> None:
    module = Interrupted()
    with pytest.raises(ValueError, match="interrupted"):
        make_private_trainer().fit(module, make_loader())
    assert [name for name, parameter in module.named_parameters() if parameter.grad is not None] == []


class SeveralLoadersLater(Lit):
    def train_dataloader(self) -> Any:
        return [make_loader(), make_loader()] if self.current_epoch else make_loader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch if isinstance(batch[0], Tensor) else batch[0], batch_idx)


def test_several_loaders_after_a_reload_are_refused(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    with pytest.raises(errors.UnsupportedDataError, match="several loaders"):
        trainer.fit(SeveralLoadersLater())
    assert trainer.strategy.ledger.num_updates == 4


@pytest.mark.parametrize(("max_epochs", "more"), [(4, 8), (7, 20)])
def test_a_run_resumed_with_larger_batches_is_planned_for_the_updates_it_has(
    max_epochs: int, more: int, make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    """Two epochs of eight updates, then epochs of four."""

    def trainer(epsilon: float, epochs: int) -> pl.Trainer:
        budget = lightning_dp.PrivacyBudget(epsilon=epsilon, delta=1e-5, statement=False)
        return make_trainer(strategy="private", callbacks=[budget], max_epochs=epochs)

    first = trainer(2, 2)
    first.fit(Lit(), make_loader(8))
    first.save_checkpoint(tmp_path / "first.ckpt")
    second = trainer(4, max_epochs)
    second.fit(Lit(), make_loader(16), ckpt_path=str(tmp_path / "first.ckpt"))
    assert second.strategy.ledger.num_updates == 16 + more
    assert 3.996 <= second.strategy.guarantee.epsilon <= 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        out += x
        return out


def attention_net() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, 3))


def not_supported() -> dict[str, tuple[str, Callable[[], nn.Module], str]]:
    return {
        "a residual in place": ("hooks", lambda: nn.Sequential(Residual(), nn.Linear(8, 3)), r"x = x \+ y"),
        "attention": (
            "bookkeeping",
            attention_net,
            "replace_unsupported=True",
        ),
        "attention with hooks": (
            "hooks",
            attention_net,
            "replace_unsupported=True",
        ),
        "a trainable layer in eval mode": (
            "hooks",
            lambda: nn.Sequential(nn.Linear(8, 3).eval()),
            r"`net\.0`.*eval mode",
        ),
    }


@pytest.mark.filterwarnings("ignore:Found")
@pytest.mark.parametrize(("engine", "make_net", "message"), not_supported().values(), ids=not_supported().keys())
def test_what_has_no_per_record_gradients_is_refused_for_that_reason(
    engine: str, make_net: Callable[[], nn.Module], message: str, make_private_trainer: TrainerFactory
) -> None:
    module = Lit()
    module.net = make_net()  # type: ignore[assignment]
    with pytest.raises(errors.UnsupportedModelError, match=message) as error:
        make_private_trainer(strategy={"gradient_engine": engine}).fit(module, make_loader())
    assert "number of records varies" not in str(error.value)


@pytest.mark.filterwarnings("ignore:Found")
@pytest.mark.parametrize(
    "make_net",
    [lambda: nn.Sequential(Residual(), nn.Linear(8, 3)), lambda: nn.Sequential(nn.Linear(8, 3).eval())],
    ids=["a residual in place", "a trainable layer in eval mode"],
)
def test_book_keeping_takes_what_hooks_cannot(
    make_net: Callable[[], nn.Module], make_private_trainer: TrainerFactory
) -> None:
    """Without noise and with a huge clip norm the private step is the plain one of the same batch."""
    torch.manual_seed(0)
    module = Lit()
    module.net = make_net()  # type: ignore[assignment]
    plain = copy.deepcopy(module.net)
    strategy = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "sampling_rate": 1.0}
    loader = make_loader()
    make_private_trainer(strategy=strategy, max_steps=1, max_epochs=-1).fit(module, loader)
    batch = loader.collate_fn([loader.dataset[i] for i in range(len(loader.dataset))])
    nn.functional.cross_entropy(plain(batch[0]), batch[1]).backward()
    for before, after in zip(plain.parameters(), module.net.parameters(), strict=True):
        assert torch.allclose(after, before - 0.1 * before.grad, atol=1e-6)
