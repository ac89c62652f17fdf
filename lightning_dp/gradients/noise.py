"""Gaussian noise from a stream cipher."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dp.sampling.entropy import KeyStream

BLOCK = 2**17  # numbers at a time, few enough for all steps to stay in the cache
_MANTISSA, _ONE = 2**52 - 1, 1023 << 52  # the bits of a float64 after the leading one, and those of 1.0


def normal_blocks(stream: KeyStream, index: int, *, scale: float, dtype: torch.dtype, count: int) -> Iterator[Tensor]:
    """Independent normal numbers from the stretch number ``index`` of a secret stream, without end.

    Two uniform numbers of 52 bits make two normal ones (Box and Muller, 1958): the radius in float64, since it decides
    the tails, the direction in the type that is asked for. The largest number that can come out is 8.6 standard
    deviations; the mass that is missing beyond it is 1e-17 a draw.

    Args:
        stream: The secret stream.
        index: Which stretch of it.
        scale: Standard deviation.
        dtype: Their type.
        count: How many are wanted; blocks are no larger.

    Yields:
        Vectors of an even size of at most ``BLOCK`` on the CPU, each in the memory of the last one.
    """
    size = min(BLOCK, count + count % 2)
    normal = torch.empty(size, dtype=dtype)
    cosine, sine = normal.chunk(2)
    radius, angle = torch.empty_like(cosine), torch.empty_like(sine)
    for block in stream.blocks(index, size):
        words = torch.from_numpy(block.view("int64"))
        # The mantissas of numbers in [1, 2). PRIVACY: less 1, the middle of each of the 2**52 cells of (0, 1), so that
        # the logarithm never sees zero; exact in float64.
        uniform = words.bitwise_and_(_MANTISSA).bitwise_or_(_ONE).view(torch.float64).sub_(1.0 - 2.0**-53)
        first, second = uniform.chunk(2)
        radius.copy_(first.log_().mul_(-2.0 * scale**2).sqrt_())
        angle.copy_(second.mul_(2.0 * math.pi))
        torch.cos(angle, out=cosine).mul_(radius)
        torch.sin(angle, out=sine).mul_(radius)
        yield normal


def standard_normal(stream: KeyStream, index: int, count: int) -> Tensor:
    """``count`` independent standard normal numbers; see :func:`normal_blocks`.

    Returns:
        A float64 tensor ``(count,)`` on the CPU.
    """
    blocks = normal_blocks(stream, index, scale=1.0, dtype=torch.float64, count=count)
    return torch.cat([next(blocks).clone() for _ in range(0, count, BLOCK)])[:count]
