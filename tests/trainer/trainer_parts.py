"""What the tests of Trainer features share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from fixtures import Lit
from torch import Tensor, nn


class Evaluated(Lit):
    """Validates, tests and predicts, too."""

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log(f"{stage}_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class Steps(pl.Callback):
    """Writes down where in training the validation loop ran, and how many physical batches there were.

    Attributes:
        validated_at: Number of updates before each validation.
        sanity_checked_at: Number of updates before each sanity check.
        num_batches: Physical batches of training.
    """

    def __init__(self) -> None:
        self.validated_at: list[int] = []
        self.sanity_checked_at: list[int] = []
        self.num_batches = 0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (self.sanity_checked_at if trainer.sanity_checking else self.validated_at).append(trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: Any) -> None:
        self.num_batches += 1


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def assert_updates(trainer: Any, expected: int) -> None:
    """One step of the Trainer is one entry in the ledger, and there are so many."""
    assert trainer.global_step == trainer.strategy.ledger.num_updates == expected
