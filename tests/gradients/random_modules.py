"""Random modules of all supported layers, and the loop over records that the engines are compared with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

LossOf = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


class Sequences(nn.Module):
    """Tokens through an embedding, residual blocks, perhaps a shared or tied layer, to a class."""

    def __init__(self, random: np.random.Generator) -> None:
        super().__init__()
        width, vocabulary = int(random.integers(2, 7)), int(random.integers(3, 12))
        padding = int(random.integers(vocabulary)) if random.random() < 0.5 else None
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding, sparse=False)
        self.blocks = nn.ModuleList(_sequence_block(random, width) for _ in range(int(random.integers(1, 4))))
        self.repeats = int(random.integers(1, 3))  # several forwards of the same blocks
        self.head = nn.Linear(width, vocabulary, bias=bool(random.random() < 0.5))
        if random.random() < 0.5:
            self.head.weight = self.embedding.weight
        if random.random() < 0.3:
            self.blocks.append(self.blocks[0])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.repeats):
            for block in self.blocks:
                x = x + torch.tanh(block(x))
        return self.head(x).mean(1)


def _sequence_block(random: np.random.Generator, width: int) -> nn.Module:
    kind = int(random.integers(6))
    if kind == 0:
        return nn.LayerNorm(width, bias=bool(random.random() < 0.5))
    if kind == 1:
        return nn.RMSNorm(width)
    if kind == 2:
        hidden = int(random.integers(1, 9))
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width, bias=False))
    if kind == 3:
        return Scale(width)
    if kind == 4:
        return Adapter(width, rank=2)
    return nn.Linear(width, width)


class Scale(nn.Module):
    """Direct parameters without a rule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.sin(self.shift * x)


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Images(nn.Module):
    """Signals, images or volumes through convolutions and norms, to a class."""

    def __init__(self, random: np.random.Generator, dimensions: int) -> None:
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        instance_norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dimensions - 1]
        layers: list[nn.Module] = []
        channels = 2
        for _ in range(int(random.integers(1, 4))):
            groups = int(random.choice([1, 2]))
            out = groups * int(random.integers(1, 4))
            layers.append(
                convolution(
                    channels,
                    out * 2,
                    kernel_size=int(random.integers(1, 4)),
                    stride=int(random.integers(1, 3)),
                    padding=int(random.integers(1, 3)),
                    dilation=int(random.integers(1, 3)),
                    groups=groups,
                    bias=bool(random.random() < 0.5),
                    padding_mode=str(random.choice(["zeros", "circular"])) if dimensions < 3 else "zeros",
                )
            )
            channels = out * 2
            norm = int(random.integers(3))
            if norm == 1:
                layers.append(nn.GroupNorm(2, channels))
            if norm == 2:
                layers.append(instance_norm(channels, affine=True))
            layers.append(nn.ReLU(inplace=True) if random.random() < 0.5 else nn.Tanh())
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).flatten(2).mean(2))


def random_case(seed: int, records: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A module in float64 with some parameters frozen, and a batch of inputs and targets."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    if random.random() < 0.5:
        module: nn.Module = Sequences(random)
        vocabulary = module.head.out_features
        x = torch.randint(vocabulary, (records, int(random.integers(1, 8))))
        y = torch.randint(vocabulary, (records,))
    else:
        dimensions = int(random.integers(1, 4))
        module = Images(random, dimensions)
        x = torch.randn(records, 2, *[int(n) for n in random.integers(6, 9, dimensions)], dtype=torch.float64)
        y = torch.randint(3, (records,))
    for parameter in module.parameters():
        if random.random() < 0.2:
            parameter.requires_grad_(False)
    next(module.parameters()).requires_grad_(True)
    return module.double(), (x, y)


def cross_entropy(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(module(inputs), targets)


def loop_over_records(module: nn.Module, batch: tuple[Tensor, ...], loss_of: LossOf = cross_entropy) -> list[Tensor]:
    """The gradient of each record alone as one vector, zeros for parameters that take no part; autograd's own."""
    trained = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for i in range(len(batch[0])):
        record = tuple(x[i : i + 1] for x in batch)
        gradients = torch.autograd.grad(loss_of(module, record), trained, allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]
        rows.append(torch.cat([piece.flatten() for piece in pieces]))
    return rows


def clipped(rows: list[Tensor], max_norm: float) -> Tensor:
    """Their clipped sum; a record that is not finite adds nothing."""
    kept = [row for row in rows if bool(torch.isfinite(row).all())]
    total = torch.zeros_like(rows[0])
    for row in kept:
        norm = float(row.norm())
        total += row * min(1.0, max_norm / norm) if norm else row
    return total
