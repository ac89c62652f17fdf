"""Small models: a convolutional one, a wide batch of a multilayer perceptron, and a bag of words."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mnist_cnn() -> nn.Module:
    """Two convolutions and two linear layers, for images ``(records, 1, 28, 28)``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def perceptron(width: int = 256) -> nn.Module:
    """Four linear layers, for features ``(records, 128)``."""
    return nn.Sequential(
        nn.Linear(128, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 128),
        nn.ReLU(),
        nn.Linear(128, 2),
    )


class BagOfWords(nn.Module):
    """The mean of the embeddings of all tokens, and two linear layers, for ids ``(records, positions)``.

    Args:
        vocabulary: Number of tokens.
    """

    def __init__(self, vocabulary: int = 20_000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128)
        self.classifier = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores ``(records, 2)``."""
        scores: Tensor = self.classifier(self.embedding(ids).mean(dim=1))
        return scores


class ResidualBlock(nn.Module):
    """Two convolutions before each of which comes GroupNorm, and a way around them.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inputs), nn.GroupNorm(16, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From ``(records, inputs, height, width)`` to ``(records, outputs, height / stride, width / stride)``."""
        y = torch.relu(self.norm1(x))
        z = self.conv2(torch.relu(self.norm2(self.conv1(y))))
        out: Tensor = z + self.shortcut(y)
        return out


def wide_resnet(widen: int = 4) -> nn.Module:
    """The WRN-16 of Zagoruyko and Komodakis (2016) with GroupNorm, for images ``(records, 3, 32, 32)``."""
    blocks: list[nn.Module] = []
    channels = 16
    for stage, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
        for block in range(2):
            blocks.append(ResidualBlock(channels, width, stride=2 if stage and not block else 1))
            channels = width
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        *blocks,
        nn.GroupNorm(16, channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )
