"""One vector for all parameters: the sum of a logical batch, and the noisy gradient that is released."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lightning_dp.gradients.noise import BLOCK, normal_blocks
from lightning_dp.sampling.entropy import KeyStream


class FlatGradient:
    """A vector in float32 or float64 with a view for each parameter.

    Args:
        parameters: The parameters, by name; their order is that of the vector.
        has_side: Whether there is one more element, for what a clipping rule adds up beside the gradient.

    Attributes:
        vector: All of it, ``(total number of elements,)``.
        views: The piece of each parameter, in its shape.
        side: The element that is no parameter's, ``(1,)``; else ``(0,)``.
        used: Parameters that took part in what was added.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, has_side: bool = False) -> None:
        dtype, device = _widest(parameters.values()), next(iter(parameters.values())).device
        self.used: set[str] = set()
        sizes = [p.numel() for p in parameters.values()]
        self.vector = torch.zeros(sum(sizes) + has_side, dtype=dtype, device=device)
        *pieces, self.side = torch.split(self.vector, [*sizes, int(has_side)])
        self.views = {name: piece.view(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}

    def fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether it is laid out for these parameters."""
        alike = list(self.views) == list(parameters) and self.vector.dtype == _widest(parameters.values())
        return alike and all(
            view.shape == parameter.shape and view.device == parameter.device
            for view, parameter in zip(self.views.values(), parameters.values(), strict=True)
        )

    def take(self, raw: FlatGradient, *, factor: float, scale: float, stream: KeyStream | None, index: int) -> None:
        """Becomes ``factor`` times another vector plus noise, and sets that one to zero.

        Args:
            raw: The other vector, of the same layout.
            factor: What it is multiplied by.
            scale: Standard deviation of the noise.
            stream: Where the noise comes from; None for no noise.
            index: Which stretch of it.
        """
        if stream is None or scale == 0:
            torch.mul(raw.vector, factor, out=self.vector)
        else:
            vector, on_cpu = self.vector, self.vector.device.type == "cpu"
            blocks = normal_blocks(stream, index, scale=scale, dtype=vector.dtype, count=len(vector))
            pieces = zip(vector.split(BLOCK), raw.vector.split(BLOCK), strict=True)  # type: ignore[no-untyped-call]
            for (piece, summed), noise in zip(pieces, blocks, strict=False):
                if on_cpu:  # in one go, while the noise is in the cache
                    torch.add(noise[: len(piece)], summed, alpha=factor, out=piece)
                    summed.zero_()
                else:
                    piece.copy_(noise[: len(piece)])
            if not on_cpu:
                vector.add_(raw.vector, alpha=factor)
        raw.vector.zero_()
        raw.used.clear()

    def hand_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Makes the views the gradients of the parameters, in their own types."""
        for parameter, view in zip(parameters, self.views.values(), strict=True):
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)


def _widest(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """A type that holds the numbers of all parameters, float32 at least."""
    return functools.reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
