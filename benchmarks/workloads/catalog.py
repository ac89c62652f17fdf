"""The workloads and what an update of each may cost over one of plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workloads.encoder import Encoder, adapted_encoder
from workloads.models import BagOfWords, mnist_cnn, perceptron, wide_resnet


@dataclass(frozen=True, kw_only=True)
class Target:
    """What must be reached.

    Attributes:
        time: Time of an update over plain Lightning's, at most.
        memory: Peak memory over plain Lightning's, at most.
    """

    time: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data, and the size of a batch.

    Attributes:
        about: For the table.
        model: Makes the model.
        draw: Makes the inputs of so many records.
        batch: Records of an update; its expectation where batches are drawn at random.
        target: What the defaults must reach.
        frugal: What ``gradient_memory="low"`` must reach.
        classes: Number of labels.
    """

    about: str
    model: Callable[[], nn.Module]
    draw: Callable[[int], Tensor]
    batch: int
    target: Target | None = None
    frugal: Target | None = None
    classes: int = 10


def images(channels: int, size: int) -> Callable[[int], Tensor]:
    """Draws square images."""
    return lambda count: torch.randn(count, channels, size, size)


def features(count: int) -> Tensor:
    """Draws ``(count, 128)`` normal numbers."""
    return torch.randn(count, 128)


def tokens(vocabulary: int, positions: int = 128) -> Callable[[int], Tensor]:
    """Draws sequences of ids whose frequencies follow Zipf's law."""

    def draw(count: int) -> Tensor:
        frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
        return torch.multinomial(frequencies, count * positions, replacement=True).view(count, positions)

    return draw


def cnn(batch: int, target: Target) -> Workload:
    """The convolutional network with one or another size of batch."""
    return Workload(
        about=f"CNN, 28x28, batch {batch:,}", model=mnist_cnn, draw=images(1, 28), batch=batch, target=target
    )


WORKLOADS: dict[str, Workload] = {
    "mnist_256": cnn(256, Target(time=1.3, memory=1.5)),
    "mnist_1024": cnn(1024, Target(time=1.4, memory=1.7)),
    "mlp_4096": Workload(
        about="MLP 128-256-256-128-2, batch 4,096",
        model=perceptron,
        draw=features,
        batch=4096,
        target=Target(time=1.25, memory=2.0),
        classes=2,
    ),
    "enc_32": Workload(
        about="4-layer encoder, 256 wide, 128 tokens, batch 32",
        model=Encoder,
        draw=tokens(2000),
        batch=32,
        target=Target(time=1.2, memory=2.4),
        frugal=Target(time=1.4, memory=1.15),
        classes=2,
    ),
    "wrn_64": Workload(
        about="WRN-16-4 with GroupNorm, 32x32, batch 64",
        model=wide_resnet,
        draw=images(3, 32),
        batch=64,
        target=Target(time=1.4, memory=2.5),
        frugal=Target(time=1.5, memory=1.4),
    ),
    "emb_64": Workload(
        about="embedding 20,000 x 128 and MLP, 128 tokens, batch 64",
        model=BagOfWords,
        draw=tokens(20_000),
        batch=64,
        target=Target(time=3.5, memory=2.0),
        classes=2,
    ),
    "enc_lora": Workload(
        about="the encoder frozen, adapters of rank 8, batch 32",
        model=adapted_encoder,
        draw=tokens(2000),
        batch=32,
        target=Target(time=1.05, memory=1.2),
        classes=2,
    ),
}
