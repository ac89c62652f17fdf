"""Gradients of parameters with many rows, compared without writing them out."""

from __future__ import annotations

import pytest
import torch
from random_modules import cross_entropy
from torch import Tensor, nn

from lightning_dp.gradients import BookKeepingEngine, GradientEngine, HookEngine
from lightning_dp.gradients.layers.pressed import MOST_ROWS, press

MANY = MOST_ROWS + 44


class Tied(nn.Module):
    """One table looked up, and used as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(MANY, 5, padding_idx=2), nn.Linear(5, MANY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).tanh()).mean(1)


MODELS: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Sequential(nn.Linear(4, MANY), nn.Tanh(), nn.Linear(MANY, 3)), torch.randn(6, 4)),
    "positions": (
        nn.Sequential(nn.Linear(4, MANY), nn.Tanh(), nn.Flatten(), nn.Linear(2 * MANY, 3)),
        torch.randn(6, 2, 4),
    ),
    "convolution": (
        nn.Sequential(nn.Conv1d(2, MANY, 2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * MANY, 3)),
        torch.randn(6, 2, 4),
    ),
    "embedding": (
        nn.Sequential(nn.Embedding(MANY, 4, padding_idx=1), nn.Flatten(), nn.Linear(28, 3)),
        torch.randint(MANY, (6, 7)),
    ),
    "bag": (nn.Sequential(nn.EmbeddingBag(MANY, 4), nn.Linear(4, 3)), torch.randint(MANY, (6, 7))),
    "largest of a bag": (
        nn.Sequential(nn.EmbeddingBag(MANY, 4, mode="max"), nn.Linear(4, 3)),
        torch.randint(MANY, (6, 7)),
    ),
    "tied": (Tied(), torch.randint(MANY, (6, 7))),
}


def rows_of(engine: GradientEngine, x: Tensor, *, pressed: bool) -> dict[str, Tensor]:
    loss = cross_entropy(engine.module, (x, torch.arange(len(x)) % 3))
    engine.prepare(loss)
    engine.backward(loss)
    return engine.take_rows(len(x), pressed=pressed)


@pytest.mark.parametrize("name", MODELS)
def test_pressed_rows_are_what_rows_press_to(name: str) -> None:
    module, x = MODELS[name]
    engine = BookKeepingEngine(module)
    engine.attach()
    for _ in range(2):  # before and after ways to the norms were chosen
        written, pressed = rows_of(engine, x, pressed=False), rows_of(engine, x, pressed=True)
        assert written.keys() == pressed.keys()
        for leaf, row in written.items():
            torch.testing.assert_close(pressed[leaf], press(row, 1) if row.dim() > 2 else row, rtol=1e-4, atol=1e-6)
            assert pressed[leaf].dim() == 2 or pressed[leaf].shape[1] <= MOST_ROWS
    engine.detach()


def test_both_engines_press_alike() -> None:
    module, x = MODELS["linear"]
    found = []
    for engine in (BookKeepingEngine(module), HookEngine(module)):
        engine.attach()
        found.append(rows_of(engine, x, pressed=True))
        engine.detach()
    for leaf, row in found[0].items():
        torch.testing.assert_close(found[1][leaf], row, rtol=1e-4, atol=1e-6)


def test_pressing_keeps_the_length_of_a_difference() -> None:
    """In the mean over many draws of one row; the bound is five standard deviations."""
    torch.manual_seed(0)
    x = torch.randn(2000, MANY, 3)
    ratios = press(x, 1).flatten(1).square().sum(1) / x.flatten(1).square().sum(1)
    assert abs(float(ratios.mean()) - 1) < 5 * float(ratios.std()) / 2000**0.5
    assert float(ratios.min()) > 0.5
