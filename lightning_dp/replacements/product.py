"""A linear layer made of parameters that exist."""

from __future__ import annotations

from typing import Any

from torch import nn


def product(weight: Any, bias: Any) -> nn.Linear:
    """A layer that multiplies by ``weight``, ``(outputs, inputs)``, and adds ``bias``, ``(outputs,)`` or None."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight, layer.bias = weight, bias
    return layer
