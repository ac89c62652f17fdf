"""Linear layers."""

from __future__ import annotations

import math

from torch import nn

from lightning_dp.gradients.layers.outer import Outer
from lightning_dp.gradients.layers.registry import LayerForward, register_layer
from lightning_dp.gradients.layers.use import Rows, Use, wide


@register_layer(nn.Linear)
def linear(forward: LayerForward) -> dict[str, Use]:
    """Weight ``(outputs, inputs)`` and bias ``(outputs,)`` of inputs ``(records, ..., inputs)``."""
    records, *middle, outputs = forward.gradient.shape
    positions = math.prod(middle)
    b = forward.gradient.reshape(records, positions, outputs)
    uses: dict[str, Use] = {}
    if "weight" in forward.wanted:
        a = forward.inputs[0].reshape(records, positions, forward.layer.in_features)
        uses["weight"] = Outer(a, b, forward.layer.weight.shape, f"{forward.path}.weight")
    if "bias" in forward.wanted:
        uses["bias"] = Rows(wide(b).squeeze(1) if positions == 1 else wide(b).sum(1))
    return uses
