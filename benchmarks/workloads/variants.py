"""Ways to train a workload: loops of PyTorch, the Trainer, and this library in it. Each runs until it is killed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import lightning_dp as ldp
from workloads import peers
from workloads.catalog import Workload
from workloads.data import SEED, loader, poisson_loader
from workloads.meter import Meter

LEARNING_RATE = 0.01

Variant = Callable[[Workload, Meter], None]


class Classifier(pl.LightningModule):
    """What everybody writes, unaware of privacy.

    Args:
        model: Gives scores.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean of the losses of all records."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD over what is trained."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LEARNING_RATE)


class Turns(pl.Callback):
    """Tells the meter of every update.

    Args:
        meter: Makes the Trainer wait.
        chunks: Batches of an update.
    """

    def __init__(self, meter: Meter, chunks: int = 1) -> None:
        self._meter, self._chunks, self._records = meter, chunks, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called before the strategy looks at the module."""
        self._meter.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after each batch."""
        self._records += len(batch[1])
        if (batch_idx + 1) % self._chunks == 0:
            self._meter.update(self._records)
            self._records = 0


def in_trainer(make_strategy: Callable[[], Any] | None = None, *, chunks: int = 1) -> Variant:
    """Training by Lightning's Trainer.

    Args:
        make_strategy: Makes the strategy; the plain one if there is none.
        chunks: ``accumulate_grad_batches``.
    """

    def train(workload: Workload, meter: Meter) -> None:
        trainer = pl.Trainer(
            accelerator="cpu" if meter.device.type == "cpu" else "gpu",
            devices=1,
            strategy=make_strategy() if make_strategy else "auto",
            callbacks=[Turns(meter, chunks)],
            accumulate_grad_batches=chunks,
            max_epochs=-1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batches = loader(workload) if make_strategy else poisson_loader(workload)
        trainer.fit(Classifier(workload.model()), batches)

    return train


def private(**settings: Any) -> Variant:
    """Training by the Trainer with this library's strategy."""
    fixed = {"noise_multiplier": peers.NOISE, "max_grad_norm": peers.NORM, "insecure_seed": SEED}
    return in_trainer(lambda: ldp.PrivateStrategy(**fixed, **settings))


def in_loop(make_step: peers.MakeStep) -> Variant:
    """Training by a loop over the batches, with the step of a peer."""

    def train(workload: Workload, meter: Meter) -> None:
        torch.manual_seed(0)
        batches, model = loader(workload), workload.model().to(meter.device)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
        step = make_step(model, optimizer, workload.batch)
        meter.start()
        for inputs, labels in _forever(batches):
            step(inputs.to(meter.device), labels.to(meter.device))
            meter.update(len(labels))

    return train


def _forever(batches: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(batches))


PLAIN = "plain Lightning"
OURS = "ours"
FRUGAL = "ours, low memory"

VARIANTS: dict[str, Variant] = {
    "plain loop": in_loop(peers.plain),
    PLAIN: in_trainer(),
    OURS: private(),
    FRUGAL: private(gradient_memory="low"),
    "ours, hooks": private(gradient_engine="hooks"),
    "Opacus hooks": in_loop(peers.opacus("hooks")),
    "Opacus ghost": in_loop(peers.opacus("ghost")),
    "Opacus functorch": in_loop(peers.opacus("functorch")),
    "Opacus ew": in_loop(peers.opacus("ew")),
    "opake": in_loop(peers.opake),
    "torch.func": in_loop(peers.vectorized),
}


def is_peer(variant: str) -> bool:
    """Whether a variant is a private one of somebody else."""
    return variant in VARIANTS and variant not in ("plain loop", PLAIN) and not variant.startswith(OURS)
