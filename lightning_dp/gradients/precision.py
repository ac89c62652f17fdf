"""Keeps norms and sums in full precision, whatever the user allows for the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products without autocast, without a graph, and without reduced float32 formats such as TF32."""
    allowed = torch.get_float32_matmul_precision()
    # PRIVACY: a norm from inputs that were rounded to ten bits may be too small for the sum that it is to bound.
    if allowed != "highest":
        torch.set_float32_matmul_precision("highest")
    convolutions = device.type == "cuda" and torch.backends.cudnn.allow_tf32
    if convolutions:
        torch.backends.cudnn.allow_tf32 = False
    casting = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    try:
        with torch.no_grad(), casting:
            yield
    finally:
        if allowed != "highest":
            torch.set_float32_matmul_precision(allowed)
        if convolutions:
            torch.backends.cudnn.allow_tf32 = True
