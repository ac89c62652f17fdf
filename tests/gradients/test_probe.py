"""The probe finds what voids the guarantee, and lets everything else pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import errors

Step = Callable[[Any, Tensor, Tensor], Tensor]


class Custom(Lit):
    """A `Lit` with another loss and, if wanted, other layers."""

    def __init__(self, loss: Step, net: nn.Module | None = None, **extra: nn.Module) -> None:
        super().__init__()
        self.loss = loss
        if net is not None:
            self.net = net  # type: ignore[assignment]
        for name, module in extra.items():
            setattr(self, name, module)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self, *batch)


def plain(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y)


def two_views(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((module(x) + module(-x)) / 2, y)


def with_metric(module: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = module(x)
    module.accuracy.update(logits.detach().argmax(1), y)
    return F.cross_entropy(logits, y)


def top_half(module: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(module(x), y, reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def mixup(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module((x + x.flip(0)) / 2), y)


def contrastive(module: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(module(x), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))


def class_weighted(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y, weight=torch.tensor([1.0, 5.0, 25.0]))


def functional_use(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y) + F.linear(x, module.net[0].weight).square().mean()


def repeated(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(torch.cat([x, x])), torch.cat([y, y]))


def filtered(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x[:-1]), y[:-1])


def summed(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x), y, reduction="sum")


def centred(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x - x.mean(0)), y)


def running_mean(module: Any, x: Tensor, y: Tensor) -> Tensor:
    module.center.weight.data += x.mean()
    return F.cross_entropy(module(x), y)


GOOD = {
    "cross-entropy": lambda: Custom(plain),
    "two views of a record": lambda: Custom(two_views),
    "dropout": lambda: Custom(plain, nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))),
    "layer norm": lambda: Custom(plain, nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3))),
    "convolution and group norm": lambda: Custom(
        plain,
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3)),
    ),
    "shared layer": lambda: Custom(plain, nn.Sequential(*[nn.Linear(8, 8)] * 2, nn.Linear(8, 3))),
    "frozen batch norm in eval mode": lambda: Custom(
        plain, nn.Sequential(nn.BatchNorm1d(8).requires_grad_(False).eval(), nn.Linear(8, 3))
    ),
    "training metric": lambda: Custom(with_metric, accuracy=MulticlassAccuracy(3)),
}

BAD = {
    "top half of the losses": (lambda: Custom(top_half), "depends on"),
    "mixup": (lambda: Custom(mixup), "depends on"),
    "contrastive": (lambda: Custom(contrastive), "depends on"),
    "class-weighted mean": (lambda: Custom(class_weighted), "depends on"),
    "centred by the batch": (lambda: Custom(centred), "depends on"),
    "functional use of a weight": (lambda: Custom(functional_use), r"`net\.0\.weight`.*outside the forward"),
    "repeated records": (lambda: Custom(repeated), "gradient rows for"),
    "filtered records": (lambda: Custom(filtered), "gradient rows for"),
    "summed loss": (lambda: Custom(summed), 'reduction="mean"'),
    "state that follows the data": (
        lambda: Custom(running_mean, center=nn.Linear(1, 1).requires_grad_(False)),
        r"`center\.weight` is changed",
    ),
    "batch norm": (
        lambda: Custom(plain, nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))),
        r"`net\.1`",
    ),
    "batch norm without parameters": (
        lambda: Custom(plain, nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))),
        r"`net\.0`",
    ),
    "instance norm with statistics": (
        lambda: Custom(
            plain,
            nn.Sequential(
                nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(8, 3)
            ),
        ),
        r"`net\.1`",
    ),
}


@pytest.mark.filterwarnings("ignore:Found 1 module")
@pytest.mark.parametrize("make_module", GOOD.values(), ids=GOOD.keys())
def test_a_loss_of_independent_records_passes(
    make_module: Callable[[], pl.LightningModule], make_private_trainer: TrainerFactory
) -> None:
    trainer = make_private_trainer(max_epochs=1)
    trainer.fit(make_module(), make_loader())
    assert trainer.strategy.ledger.num_updates == 4


@pytest.mark.parametrize(("make_module", "message"), BAD.values(), ids=BAD.keys())
def test_what_ties_records_together_is_refused_before_anything_is_released(
    make_module: Callable[[], pl.LightningModule], message: str, make_private_trainer: TrainerFactory
) -> None:
    trainer = make_private_trainer(max_epochs=1)
    with pytest.raises(errors.UnsupportedModelError, match=message):
        trainer.fit(make_module(), make_loader())
    assert trainer.strategy.ledger.num_updates == 0


def test_the_probe_changes_neither_the_module_nor_the_random_numbers_of_the_user(
    make_private_trainer: TrainerFactory,
) -> None:
    states, draws = [], []

    class Watching(Lit):
        def on_train_start(self) -> None:
            torch.manual_seed(3)

        def on_train_epoch_start(self) -> None:
            states.append({name: value.clone() for name, value in self.state_dict().items()})
            draws.append(torch.rand(1))

    module = Watching()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    make_private_trainer(max_epochs=1).fit(module, make_loader())
    assert all(torch.equal(value, states[0][name]) for name, value in start.items())
    torch.manual_seed(3)
    assert torch.equal(draws[0], torch.rand(1))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_records_are_enough_to_run(count: int, make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(max_epochs=1, strategy={"delta": 1e-2})
    trainer.fit(Lit(), make_loader(1, count))
    assert trainer.strategy.ledger.num_updates == count


def test_a_module_that_cannot_be_copied_is_refused_with_the_reason(make_private_trainer: TrainerFactory) -> None:
    module = Lit()
    module.history = torch.ones(1, requires_grad=True) * 2  # type: ignore[assignment]
    with pytest.raises(errors.UnsupportedModelError, match="cannot be copied"):
        make_private_trainer().fit(module, make_loader())


def test_an_ordinary_mistake_in_the_module_stays_what_it_is(make_private_trainer: TrainerFactory) -> None:
    """It fails on every batch, so it is not blamed on private training."""

    def mistaken(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module.missing(x), y)

    with pytest.raises(AttributeError, match="missing"):
        make_private_trainer().fit(Custom(mistaken), make_loader())


def test_a_loss_in_which_no_parameter_takes_part_gives_noise_only(make_private_trainer: TrainerFactory) -> None:
    def detached(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x.detach().requires_grad_() ** 2).mean()

    trainer = make_private_trainer(max_epochs=1)
    trainer.fit(Custom(detached), make_loader())
    assert trainer.strategy.ledger.num_updates == 4
