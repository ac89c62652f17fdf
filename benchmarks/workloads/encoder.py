"""A transformer encoder whose attention is made of linear layers, trained in full or through adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention, of plain linear layers, which every library can differentiate record by record.

    Args:
        width: Channels.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """From ``(records, positions, width)`` to the same."""
        records, positions, width = x.shape
        q, k, v = (
            project(x).view(records, positions, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(2, 3) * (width // self.heads) ** -0.5).softmax(dim=-1)
        y: Tensor = self.out((weights @ v).transpose(1, 2).reshape(records, positions, width))
        return y


class EncoderLayer(nn.Module):
    """Attention and a network of two layers, each after LayerNorm and with a way around it.

    Args:
        width: Channels.
        hidden: Channels between the two layers.
        heads: Number of heads.
    """

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """From ``(records, positions, width)`` to the same."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.feed_forward(self.norm2(x))
        return y


class Encoder(nn.Module):
    """A classifier of sequences of ids ``(records, positions)``.

    Args:
        width: Channels.
        layers: Number of layers.
        vocabulary: Number of tokens.
        positions: Longest sequence.
    """

    def __init__(self, width: int = 256, layers: int = 4, vocabulary: int = 2000, positions: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, 4 * width, heads=4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores ``(records, 2)``."""
        # One row of positions for each record: a table that is read once for all of them has no rows to clip.
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        x = self.layers(self.tokens(ids) + self.positions(places))
        scores: Tensor = self.head(self.norm(x).mean(dim=1))
        return scores


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank (Hu et al., 2022).

    Args:
        base: The layer.
        rank: Of the update.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """From ``(..., inputs)`` to ``(..., outputs)``."""
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def adapted_encoder(rank: int = 8) -> nn.Module:
    """The encoder, frozen but for adapters on all queries and values, and for its head."""
    model = Encoder()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        for name in ("q", "v"):
            setattr(attention, name, Adapted(getattr(attention, name), rank))
    return model
