"""Embeddings and bags of embeddings: each record touches few rows of the table, and only those are written."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.layers.lookup import Collapsed, Lookup, Pairs
from lightning_dp.gradients.layers.registry import LayerForward, register_layer
from lightning_dp.gradients.layers.use import Use, squared, wide, zeroed
from lightning_dp.gradients.layers.workspace import Workspace


@register_layer(nn.Embedding)
def embedding(forward: LayerForward) -> dict[str, Use]:
    """Table ``(vocabulary, width)`` of inputs ``(records, ...)``.

    Raises:
        UnsupportedModelError: The layer divides by frequencies in the whole batch.
    """
    _refuse_frequencies(forward)
    layer, b = forward.layer, forward.gradient
    ids = forward.inputs[0].reshape(len(b), math.prod(b.shape[1:-1])).long()
    values = b.reshape(*ids.shape, layer.embedding_dim)
    return {"weight": Lookup(ids, values, layer.weight.shape, layer.padding_idx)}


@register_layer(nn.EmbeddingBag)
def embedding_bag(forward: LayerForward) -> dict[str, Use]:
    """Table ``(vocabulary, width)`` of bags, one for each record, in any of the forms that the layer takes.

    Raises:
        UnsupportedModelError: The layer divides by frequencies in the whole batch.
    """
    _refuse_frequencies(forward)
    layer, b = forward.layer, wide(forward.gradient)
    ids, offsets, factors = (*forward.inputs, None, None)[:3]
    if layer.mode == "max":
        return {"weight": _largest(layer, ids, offsets, b)}
    if ids.dim() == 2:
        owners = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    else:
        owners = _owners(offsets, len(ids))
    tokens = ids.reshape(-1).long()
    factors = b.new_ones(len(tokens)) if factors is None else factors.reshape(-1).to(b.dtype)
    counted = owners < len(b)
    if layer.padding_idx is not None:
        counted &= tokens != layer.padding_idx
    owners, tokens, factors = owners[counted], tokens[counted], factors[counted]
    if layer.mode == "mean":
        factors = factors / torch.bincount(owners, minlength=len(b))[owners]
    pairs = Pairs.of(owners, tokens, len(layer.weight))
    values = b[pairs.owners] * pairs.sums(factors.unsqueeze(1))
    return {"weight": Collapsed(pairs.owners, pairs.tokens, values, len(b), layer.weight.shape)}


def _refuse_frequencies(forward: LayerForward) -> None:
    if forward.layer.scale_grad_by_freq:
        raise UnsupportedModelError(
            f"`{forward.path}` ({type(forward.layer).__name__}) has `scale_grad_by_freq=True`: it divides by how often"
            " an index comes up in the whole batch, so no record's share is its own. Set it to False."
        )


def _owners(offsets: Tensor, lookups: int) -> Tensor:
    """The bag of each look-up, ``(lookups,)``, from where the bags begin."""
    return (
        torch.searchsorted(offsets, torch.arange(lookups, device=offsets.device, dtype=offsets.dtype), right=True) - 1
    )


def _largest(layer: nn.EmbeddingBag, ids: Tensor, offsets: Tensor | None, b: Tensor) -> Use:
    """Looks up again to see which embeddings were the largest."""
    if offsets is None:
        offsets = torch.arange(0, ids.numel(), max(1, ids.shape[1]), device=ids.device, dtype=ids.dtype)
    lookup = layer.weight.detach(), ids.reshape(-1), offsets, False, 2, False, None, layer.include_last_offset
    _, _, sizes, chosen = torch.embedding_bag(*lookup, layer.padding_idx)
    b = b.masked_fill((sizes[: len(b)] == 0).unsqueeze(1), 0)
    return Largest(chosen[: len(b)].clamp(min=0), b, layer.weight.shape)


class Largest(Use):
    """The table of bags of which the largest number in each place was taken.

    Args:
        chosen: The row that each number came from, ``(records, width)``.
        b: Gradients of the bags, zero where a bag was empty, ``(records, width)``.
        shape: Shape of the table, ``(vocabulary, width)``.
    """

    def __init__(self, chosen: Tensor, b: Tensor, shape: torch.Size) -> None:
        super().__init__(len(b), shape, b)
        self.chosen, self.b = chosen, b

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        return squared(self.b), self

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        weighted = self.b * weights.to(self.dtype).unsqueeze(1)
        total.scatter_add_(0, self.chosen, weighted.to(total.dtype))

    @override
    def rows(self) -> Tensor:
        rows = self.b.new_zeros(self.records, *self.shape)
        return rows.scatter_(1, self.chosen.unsqueeze(1), self.b.unsqueeze(1))

    @override
    def only(self, kept: Tensor) -> Use:
        return Largest(self.chosen, zeroed(self.b, kept), self.shape)
