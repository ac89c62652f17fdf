"""Linear layers."""

from __future__ import annotations

import math

from torch import nn

from lightning_dp.gradients.layers.outer import Outer
from lightning_dp.gradients.layers.registry import LayerForward, register_layer
from lightning_dp.gradients.layers.use import Rows, Use, norms_of, wide


@register_layer(nn.Linear)
def linear(forward: LayerForward) -> dict[str, Use]:
    """Weight ``(outputs, inputs)`` and bias ``(outputs,)`` of inputs ``(records, ..., inputs)``."""
    records, *middle, outputs = forward.gradient.shape
    positions = math.prod(middle)
    b = wide(forward.gradient.reshape(records, positions, outputs))
    # Gradients of the outputs are those of the bias, and a factor of those of the weight.
    norms = norms_of(b) if positions == 1 and len(forward.wanted) == 2 else None
    uses: dict[str, Use] = {}
    if "weight" in forward.wanted:
        a = forward.inputs[0].reshape(records, positions, forward.layer.in_features)
        uses["weight"] = Outer(a, b, forward.layer.weight.shape, f"{forward.path}.weight", norms)
    if "bias" in forward.wanted:
        uses["bias"] = Rows(b.squeeze(1), norms) if positions == 1 else Rows(b.sum(1))
    return uses
