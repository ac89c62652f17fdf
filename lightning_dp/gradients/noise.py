"""Gaussian noise from a stream cipher."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dp.sampling.entropy import KeyStream

BLOCK = 2**15  # numbers at a time, so that all steps stay in the cache
_MANTISSA, _ONE = 2**52 - 1, 1023 << 52  # the bits of a float64 after the leading one, and those of 1.0


def normal_blocks(stream: KeyStream, index: int, *, scale: float, dtype: torch.dtype) -> Iterator[Tensor]:
    """Independent normal numbers from the stretch number ``index`` of a secret stream, without end.

    Two uniform numbers of 52 bits make two normal ones in float64 (Box and Muller, 1958). The largest number that can
    come out is 8.6 standard deviations; the mass that is missing beyond it is 1e-17 a draw.

    Args:
        stream: The secret stream.
        index: Which stretch of it.
        scale: Standard deviation.
        dtype: What they are rounded to.

    Yields:
        Vectors ``(BLOCK,)`` on the CPU, each in the memory of the last one.
    """
    normal, rounded = torch.empty(BLOCK, dtype=torch.float64), torch.empty(BLOCK, dtype=dtype)
    cosine, sine = normal.chunk(2)
    for block in stream.blocks(index, BLOCK):
        words = torch.from_numpy(block.view("int64"))
        # The mantissas of numbers in [1, 2). PRIVACY: less 1, the middle of each of the 2**52 cells of (0, 1), so that
        # the logarithm never sees zero; exact in float64.
        uniform = words.bitwise_and_(_MANTISSA).bitwise_or_(_ONE).view(torch.float64).sub_(1.0 - 2.0**-53)
        first, second = uniform.chunk(2)
        radius, angle = first.log_().mul_(-2.0 * scale**2).sqrt_(), second.mul_(2.0 * math.pi)
        torch.cos(angle, out=cosine).mul_(radius)
        torch.sin(angle, out=sine).mul_(radius)
        yield rounded.copy_(normal)


def standard_normal(stream: KeyStream, index: int, count: int) -> Tensor:
    """``count`` independent standard normal numbers; see :func:`normal_blocks`.

    Returns:
        A float64 tensor ``(count,)`` on the CPU.
    """
    blocks = normal_blocks(stream, index, scale=1.0, dtype=torch.float64)
    return torch.cat([next(blocks).clone() for _ in range(0, count, BLOCK)])[:count]
