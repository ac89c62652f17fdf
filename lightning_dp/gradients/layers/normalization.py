"""Scale and shift of layers that normalise each record on its own."""

from __future__ import annotations

import math
from typing import Any

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
    b = forward.gradient.reshape(records, math.prod(middle), math.prod(inner))
    uses: dict[str, Use] = {}
    if "weight" in forward.wanted:
        uses["weight"] = Rows(_scaled(forward.inputs[0].reshape(b.shape), b, layer).view(len(b), *inner))
    if "bias" in forward.wanted:
        uses["bias"] = Rows(wide(b).sum(1).view(len(b), *inner))
    return uses


def _scaled(a: Tensor, b: Tensor, layer: Any) -> Tensor:
    """The weight's rows ``(records, inner)``: normalised input times output gradient, summed over positions."""
    rows = wide(b.new_empty(len(b), b.shape[2]))
    for part in pieces(len(b), 2 * b.shape[1] * rows[:1].nbytes, b.device):
        x = wide(a[part])
        if isinstance(layer, nn.RMSNorm):
            normalised = F.rms_norm(x, x.shape[2:], None, layer.eps)
        else:
            normalised = F.layer_norm(x, x.shape[2:], None, None, layer.eps)
        torch.sum(normalised.mul_(b[part]), 1, out=rows[part])
    return rows


@register_layer(nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def group_norm(forward: LayerForward) -> dict[str, Use]:
    """Weight and bias, ``(channels,)`` each, of inputs ``(records, channels, ...)``.

    Raises:
        UnsupportedModelError: The input has no dimension for records.
    """
    layer, b = forward.layer, wide(forward.gradient)
    if b.dim() - 2 != _INSTANCE_EXTENTS.get(type(layer), b.dim() - 2):
        raise without_batch(forward)
    b = b.reshape(*b.shape[:2], math.prod(b.shape[2:])).contiguous()
    if "weight" not in forward.wanted:
        return {"bias": Rows(b.sum(2))}
    a = wide(forward.inputs[0]).reshape(b.shape).contiguous()
    rows = _folded(a, b, *_moments(a, layer))
    return {name: Rows(row) for name, row in rows.items() if name in forward.wanted}


def _moments(a: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation that a layer took, ``(records, groups)``.

    Args:
        a: Inputs, ``(records, channels, positions)``.
        layer: A group or instance norm.
    """
    records, channels, positions = a.shape
    if getattr(layer, "track_running_stats", False) and not layer.training:
        moments = layer.running_mean, (layer.running_var + layer.eps).rsqrt()
        return moments[0].to(a.dtype).expand(records, -1), moments[1].to(a.dtype).expand(records, -1)
    groups = getattr(layer, "num_groups", channels)
    mean, inverse = a.new_empty(records, groups), a.new_empty(records, groups)
    # The normalised input comes along; in pieces it never leaves the cache.
    for part in pieces(records, a[:1].nbytes, a.device):
        x = a[part]
        _, mean[part], inverse[part] = torch.native_group_norm(
            x, None, None, len(x), channels, positions, groups, layer.eps
        )
    return mean, inverse


def _folded(a: Tensor, b: Tensor, mean: Tensor, inverse: Tensor) -> dict[str, Tensor]:
    """Rows of weight and bias, ``(records, channels)``: the library sees one record that has the channels of all.

    Args:
        a: Inputs, ``(records, channels, positions)``, contiguous, for the library does not check all that it reads.
        b: Gradients of the outputs, likewise.
        mean: What was subtracted, ``(records, groups)``.
        inverse: What was multiplied by, ``(records, groups)``.
    """
    records, channels, positions = a.shape
    _, weight, bias = torch.ops.aten.native_group_norm_backward(
        b.view(1, -1, positions),
        a.view(1, -1, positions),
        mean.contiguous().view(1, -1),
        inverse.contiguous().view(1, -1),
        a.new_ones(records * channels),
        1,
        records * channels,
        positions,
        mean.numel(),
        [False, True, True],
    )
    return {"weight": weight.view(records, channels), "bias": bias.view(records, channels)}
