"""Parameters with many rows, pressed into few: what gradients are compared by, where they are too large to write out.

Each row of the parameter is added to one of a few, with a sign, both at random but fixed (Charikar, Chen and
Farach-Colton, 2002). That is linear, and keeps the length of a difference in the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_ROWS = 256


def pressed_shape(shape: Sequence[int]) -> torch.Size:
    """The shape that a parameter has afterwards; the same unless it has many rows."""
    return torch.Size((min(shape[0], MOST_ROWS), *shape[1:])) if len(shape) > 1 else torch.Size(shape)


def press(x: Tensor, dim: int) -> Tensor:
    """Presses the dimension of a tensor that counts a parameter's rows.

    Args:
        x: Any numbers.
        dim: The dimension.

    Returns:
        The same with at most ``MOST_ROWS`` numbers in that dimension.
    """
    size = x.shape[dim]
    if size <= MOST_ROWS:
        return x
    places, signs = places_and_signs(size, x.device)
    shape = [1] * x.dim()
    shape[dim] = size
    out = x.new_zeros([MOST_ROWS if d == dim else n for d, n in enumerate(x.shape)])
    return out.index_add_(dim, places, x * signs.to(x.dtype).view(shape))


@functools.lru_cache(maxsize=64)
def places_and_signs(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each row goes, ``(size,)``, and the sign it gets there, ``(size,)``."""
    generator = torch.Generator().manual_seed(size)
    places = torch.randint(MOST_ROWS, (size,), generator=generator)
    signs = 2 * torch.randint(2, (size,), generator=generator) - 1
    return places.to(device), signs.to(device)
