"""Scale and shift of layers that normalise each record on its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.layers.registry import LayerForward, register_layer, without_batch
from lightning_dp.gradients.layers.use import Rows, Use, wide
from lightning_dp.gradients.layers.workspace import pieces

_INSTANCE_EXTENTS: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


@register_layer(nn.LayerNorm, nn.RMSNorm)
def layer_norm(forward: LayerForward) -> dict[str, Use]:
    """Weight and bias, ``normalized_shape`` each, of inputs ``(records, ..., *normalized_shape)``.

    Raises:
        UnsupportedModelError: The layer normalises over records.
    """
    layer, inner = forward.layer, forward.layer.normalized_shape
    if forward.gradient.dim() == len(inner):
        raise UnsupportedModelError(
            f"`{forward.path}` ({type(layer).__name__}) normalises over the first dimension of its input, which holds"
            f" the records: `normalized_shape={tuple(inner)}` covers the whole input. Leave the first dimension out."
        )
    records, *middle = forward.gradient.shape[: -len(inner)]
    size = records, math.prod(middle), math.prod(inner)
    a, b = forward.inputs[0].reshape(size), forward.gradient.reshape(size)

    def normalised(x: Tensor) -> Tensor:
        if isinstance(layer, nn.RMSNorm):
            return F.rms_norm(x, x.shape[2:], None, layer.eps)
        return F.layer_norm(x, x.shape[2:], None, None, layer.eps)

    rows = _scale_and_shift(forward, a, b, 1, normalised)
    return {name: Rows(row.view(records, *inner)) for name, row in rows.items()}


@register_layer(nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def group_norm(forward: LayerForward) -> dict[str, Use]:
    """Weight and bias, ``(channels,)`` each, of inputs ``(records, channels, ...)``.

    Raises:
        UnsupportedModelError: The input has no dimension for records.
    """
    layer, b = forward.layer, forward.gradient
    if b.dim() - 2 != _INSTANCE_EXTENTS.get(type(layer), b.dim() - 2):
        raise without_batch(forward)
    size = *b.shape[:2], math.prod(b.shape[2:])
    a, b = forward.inputs[0].reshape(size), b.reshape(size)

    def normalised(x: Tensor) -> Tensor:
        if getattr(layer, "track_running_stats", False) and not layer.training:
            return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
        return F.group_norm(x, getattr(layer, "num_groups", x.shape[1]), eps=layer.eps)

    return {name: Rows(row) for name, row in _scale_and_shift(forward, a, b, 2, normalised).items()}


def _scale_and_shift(
    forward: LayerForward, a: Tensor, b: Tensor, dim: int, normalised: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Rows of weight and bias: output gradients, times what the layer normalised or not, summed over positions.

    Args:
        forward: Says which are wanted.
        a: Inputs, three-dimensional, records first.
        b: Gradients of the outputs, likewise.
        dim: The dimension of positions, 1 or 2.
        normalised: What the layer does to some records before it scales and shifts.
    """
    rows: dict[str, Tensor] = {}
    if "weight" in forward.wanted:
        rows["weight"] = wide(b.new_empty(len(b), b.shape[3 - dim]))
        # In pieces, the normalised input never leaves the cache.
        for part in pieces(len(b), 2 * a.shape[1:].numel() * rows["weight"].element_size(), b.device):
            x = normalised(wide(a[part]).contiguous())
            torch.sum(x.mul_(b[part]), dim, out=rows["weight"][part])
    if "bias" in forward.wanted:
        rows["bias"] = wide(b).sum(dim)
    return rows
