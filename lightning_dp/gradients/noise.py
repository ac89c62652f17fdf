"""Gaussian noise from a stream cipher."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dp.sampling.entropy import KeyStream

_MANTISSA_BITS = 53


def standard_normal(stream: KeyStream, index: int, count: int) -> Tensor:
    """Draws ``count`` independent standard normal numbers from the stretch number ``index`` of a secret stream.

    Two uniform numbers of 53 bits make two normal ones (Box and Muller 1958). The largest number that can come out is
    8.6; the mass that is missing beyond it is 5e-18 a draw.

    Returns:
        A float64 tensor ``(count,)`` on the CPU.
    """
    pairs = (count + 1) // 2
    words = torch.from_numpy(stream.words(index, 2 * pairs).view("int64"))
    # PRIVACY: the middle of each of the 2**53 cells, so that the logarithm never sees zero.
    uniform = ((words >> (64 - _MANTISSA_BITS)) & ((1 << _MANTISSA_BITS) - 1)).double().add_(0.5)
    uniform.mul_(2.0**-_MANTISSA_BITS)
    radius = uniform[:pairs].log_().mul_(-2.0).sqrt_()
    angle = uniform[pairs:].mul_(2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]
