"""Unedited models with layers that cannot be trained privately, trained after their replacement in place."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dp as ldp
from lightning_dp import errors

MAX_NORM = 0.3


class Block(nn.Module):
    """As in torchvision: two convolutions, BatchNorm, ReLU in place, and a residual that is added in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LanguageModel(ResNet):
    """An LSTM with its embedding tied to its head; every record has the same number of tokens."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(self(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


class Transformer(ResNet):
    """A classifier of sequences with padding, through torch's own encoder."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head((found * (tokens != 0).unsqueeze(2)).sum(1))


def images() -> TensorDataset:
    return TensorDataset(torch.randn(12, 3, 8, 8), torch.randint(3, (12,)))


def sequences() -> TensorDataset:
    tokens = torch.randint(1, 11, (12, 6))
    tokens[torch.arange(6)[None] >= torch.randint(2, 7, (12, 1))] = 0
    return TensorDataset(tokens, torch.randint(3, (12,)))


MODELS: dict[str, tuple[type[pl.LightningModule], Any]] = {
    "ResNet": (ResNet, images),
    "LSTM": (LanguageModel, sequences),
    "Transformer": (Transformer, sequences),
}


class Gradients(pl.Callback):
    """Keeps the gradients of the first update."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.found = self.found or {name: p.grad.clone() for name, p in pl_module.named_parameters()}


def clipped_mean(module: pl.LightningModule, data: TensorDataset) -> dict[str, Tensor]:
    """Record by record with plain autograd."""
    named = dict(module.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    for record in data:
        loss = module.training_step([x[None] for x in record], 0)
        gradients = torch.autograd.grad(loss, list(named.values()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for name, gradient in zip(named, gradients, strict=True):
            total[name] += gradient * min(1.0, MAX_NORM / float(norm)) / len(data)
    return total


@pytest.mark.parametrize(("kind", "make_data"), MODELS.values(), ids=MODELS.keys())
def test_a_replaced_model_trains_as_a_loop_over_records_would(
    kind: type[pl.LightningModule], make_data: Any, make_private_trainer: TrainerFactory, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, data, gradients = kind(), make_data(), Gradients()
    keys = set(module.state_dict())
    strategy = {
        "noise_multiplier": 0.0,
        "max_grad_norm": MAX_NORM,
        "sampling_rate": 1.0,
        "replace_unsupported": True,
        "delta": 1e-2,
    }
    expected: dict[str, Tensor] = {}

    class Before(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            expected.update(clipped_mean(pl_module, data))

    trainer = make_private_trainer(strategy=strategy, max_steps=2, callbacks=[Before(), gradients])
    trainer.fit(module, DataLoader(data, batch_size=12))
    assert trainer.strategy.ledger.num_updates == 2
    assert gradients.found.keys() == expected.keys()
    for name, gradient in gradients.found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)
    # What was trained is what the optimizer has, and the checkpoint is one of the unedited class.
    trained = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert trained == {id(p) for p in module.parameters()}
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    assert set(module.state_dict()) == keys
    loaded = kind.load_from_checkpoint(tmp_path / "trained.ckpt")
    ldp.replace_unsupported(loaded.train())
    inputs = data.tensors[0]
    torch.testing.assert_close(loaded.eval()(inputs), module.eval()(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "make_data"), MODELS.values(), ids=MODELS.keys())
def test_without_replacement_it_is_refused_with_the_word_for_it(
    kind: type[pl.LightningModule], make_data: Any, make_private_trainer: TrainerFactory
) -> None:
    trainer = make_private_trainer(strategy={"delta": 1e-2})
    with pytest.raises(errors.UnsupportedModelError, match="replace_unsupported=True"):
        trainer.fit(kind(), DataLoader(make_data(), batch_size=4))
    assert trainer.strategy.ledger.num_updates == 0


def test_what_was_replaced_is_said(make_private_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_private_trainer(strategy={"delta": 1e-2, "replace_unsupported": True}, max_steps=1)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer.fit(LanguageModel(), DataLoader(sequences(), batch_size=4))
    assert "Replaced for private training: lstm (LSTM)." in caplog.text


def test_a_resumed_run_replaces_anew_and_goes_on(make_private_trainer: TrainerFactory, tmp_path: Path) -> None:
    strategy = {"delta": 1e-2, "replace_unsupported": True}
    first = make_private_trainer(strategy=strategy, max_epochs=1)
    first.fit(ResNet(), DataLoader(images(), batch_size=4))
    first.save_checkpoint(tmp_path / "first.ckpt")
    later = make_private_trainer(strategy=strategy, max_epochs=2)
    later.fit(ResNet(), DataLoader(images(), batch_size=4), ckpt_path=str(tmp_path / "first.ckpt"))
    assert later.global_step == later.strategy.ledger.num_updates == 6
