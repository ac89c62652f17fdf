"""Attention with one module for each product, so that every record's gradient can be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.replacements.product import product

_PARTS = ("q", "k", "v")


class SeparableAttention(nn.Module):
    """Computes what a ``torch.nn.MultiheadAttention`` computes, and is saved as one.

    Args:
        original: Whose settings and weights it takes over.

    Raises:
        UnsupportedModelError: It was made with ``add_bias_kv=True``.
    """

    def __init__(self, original: nn.MultiheadAttention) -> None:
        super().__init__()
        if "bias_k" in dict(original.named_parameters(recurse=False)):
            raise UnsupportedModelError(
                "`torch.nn.MultiheadAttention(add_bias_kv=True)` has no replacement. Leave `add_bias_kv` out."
            )
        self.embed_dim, self.kdim, self.vdim = original.embed_dim, original.kdim, original.vdim
        self.num_heads, self.head_dim = original.num_heads, original.head_dim
        self.dropout, self.batch_first, self.add_zero_attn = (
            original.dropout,
            original.batch_first,
            original.add_zero_attn,
        )
        own = dict(original.named_parameters(recurse=False))
        joined, bias = own.get("in_proj_weight"), own.get("in_proj_bias")
        weights = [own[f"{part}_proj_weight"] for part in _PARTS] if joined is None else _split(joined)
        biases = [None] * 3 if bias is None else _split(bias)
        self.q, self.k, self.v = (product(weight, bias) for weight, bias in zip(weights, biases, strict=True))
        self.out_proj = product(original.out_proj.weight, original.out_proj.bias)
        # What `torch.nn.TransformerEncoderLayer` asks for before it takes a way around this module's forward pass.
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False
        self.register_state_dict_post_hook(_save_as_original)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_as_original)  # type: ignore[no-untyped-call]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``torch.nn.MultiheadAttention.forward``."""
        if is_causal and attn_mask is None:
            raise ValueError("`is_causal=True` needs `attn_mask`, as in `torch.nn.MultiheadAttention`.")
        inputs, is_batched = [query, key, value], query.dim() == 3
        if not is_batched:
            inputs = [x.unsqueeze(0) for x in inputs]
        elif not self.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]  # records come first, here as everywhere
        q, k, v = (self._heads(layer(x)) for layer, x in zip((self.q, self.k, self.v), inputs, strict=True))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q * self.head_dim**-0.5 @ k.transpose(2, 3)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(3), dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(self, q: Tensor, k: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
        """Both masks as numbers to add to the scores, ``(records, heads, targets, sources)`` or broadcast to that."""
        found: list[Tensor] = []
        if attn_mask is not None:
            mask = _additive(attn_mask, q.dtype)
            if mask.dim() == 3:
                mask = mask.view(len(q), self.num_heads, *mask.shape[1:])
            found.append(mask)
        if key_padding_mask is not None:
            mask = _additive(key_padding_mask, q.dtype)
            found.append(mask.view(len(q), 1, 1, mask.shape[-1]))
        if not found:
            return None
        total = found[0] if len(found) == 1 else found[0] + found[1]
        return F.pad(total, (0, k.shape[2] - total.shape[-1]))  # a zero that was added is never masked


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)


def _split(joined: nn.Parameter) -> list[nn.Parameter]:
    return [nn.Parameter(part.detach().clone(), joined.requires_grad) for part in joined.chunk(3)]


def _save_as_original(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    joined = {leaf: [state.pop(f"{prefix}{part}.{leaf}", None) for part in _PARTS] for leaf in ("weight", "bias")}
    shapes = {weight.shape for weight in joined["weight"]}
    if len(shapes) == 1:
        state[f"{prefix}in_proj_weight"] = torch.cat(joined["weight"])
    else:
        state.update({f"{prefix}{part}_proj_weight": w for part, w in zip(_PARTS, joined["weight"], strict=True)})
    if joined["bias"][0] is not None:
        state[f"{prefix}in_proj_bias"] = torch.cat(joined["bias"])


def _load_as_original(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for leaf in ("weight", "bias"):
        joined = state.pop(f"{prefix}in_proj_{leaf}", None)
        for i, part in enumerate(_PARTS):
            alone = state.pop(f"{prefix}{part}_proj_{leaf}", None) if joined is None else joined.chunk(3)[i]
            if alone is not None:
                state[f"{prefix}{part}.{leaf}"] = alone
