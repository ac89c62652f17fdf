"""A model and data that know nothing about privacy: plain Lightning, imported by every test of private training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LIGHTNINGS_OWN = {"_hparams", "_metric_attributes"}  # come into being on the first fit

NUM_RECORDS, NUM_FEATURES, NUM_CLASSES = 64, 8, 3


class Lit(pl.LightningModule):
    """A perceptron trained with cross-entropy and plain SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, labels = batch
        loss = nn.functional.cross_entropy(self(features), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_records(count: int = NUM_RECORDS) -> TensorDataset:
    """``count`` records, the same at every call: features ``(8,)`` and a label out of three."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, NUM_FEATURES, generator=generator)
    return TensorDataset(features, torch.randint(NUM_CLASSES, (count,), generator=generator))


def make_loader(batch_size: int = 16, count: int = NUM_RECORDS, **settings: Any) -> DataLoader[Any]:
    """A shuffling loader over :func:`make_records`."""
    return DataLoader(make_records(count), **{"batch_size": batch_size, "shuffle": True, **settings})


class LitData(pl.LightningDataModule):
    """A data module that hands out a loader of :func:`make_loader` and writes down which of its hooks ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def train_dataloader(self) -> DataLoader[Any]:
        self.calls.append("train_dataloader")
        return make_loader()


class Recorder(pl.Callback):
    """Keeps what an onlooker can see of each physical batch and each update.

    Attributes:
        batches: The features of each physical batch, ``(records, 8)``; a batch without records shows one row of zeros.
        labels: Their labels.
        states: The parameters before each update, by name.
        gradients: What the optimizer was given for each update, by name.
        updates_before: How many updates had been made when each physical batch came.
    """

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.updates_before: list[int] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch[0].clone())
        self.labels.append(batch[1].clone())
        self.updates_before.append(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        named = list(pl_module.named_parameters())
        self.states.append({name: parameter.detach().clone() for name, parameter in named})
        self.gradients.append({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})

    @property
    def sizes(self) -> list[int]:
        """Number of real records of each physical batch."""
        return [int((features != 0).any(dim=1).sum()) for features in self.batches]

    def records_of_update(self, update: int) -> tuple[Tensor, Tensor]:
        """The real records of all physical batches of one update: features and labels."""
        mine = [i for i, before in enumerate(self.updates_before) if before == update]
        features = torch.cat([self.batches[i] for i in mine])
        real = (features != 0).any(dim=1)
        return features[real], torch.cat([self.labels[i] for i in mine])[real]


def sum_of_clipped(module: pl.LightningModule, features: Tensor, labels: Tensor, max_norm: float) -> dict[str, Tensor]:
    """What one update of DP-SGD adds up before noise, record by record with plain autograd."""
    parameters = dict(module.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for feature, label in zip(features, labels, strict=True):
        loss = nn.functional.cross_entropy(module(feature[None]), label[None])
        gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in gradients)).float()
        for name, gradient in zip(parameters, gradients, strict=True):
            total[name] += gradient * torch.clamp(max_norm / norm, max=1.0)
    return total


def attributes_of(module: nn.Module) -> dict[str, list[str]]:
    """Everything that can be hung on a module, its layers and its parameters: attribute names and numbers of hooks.

    What Lightning itself adds is left out.
    """
    found: dict[str, list[str]] = {}
    for path, layer in module.named_modules():
        hooks = [f"{name}: {len(value)}" for name, value in vars(layer).items() if name.endswith("_hooks") and value]
        found[f"module {path}"] = sorted(set(vars(layer)) - LIGHTNINGS_OWN) + sorted(hooks)
    for path, parameter in module.named_parameters():
        found[f"parameter {path}"] = sorted(dir(parameter))
    return found
