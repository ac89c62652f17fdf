"""From the chunks of one logical batch to the one gradient that is released."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lightning_dp.gradients.clipping import clipped_sum
from lightning_dp.gradients.hooks import RecordGradients
from lightning_dp.gradients.noise import standard_normal
from lightning_dp.sampling.entropy import KeyStream


class ClippedSum:
    """Adds up the clipped gradients of the records of one logical batch, chunk by chunk.

    Args:
        gradients: Where the rows of each chunk come from.
        max_grad_norm: Largest L2 norm of one record's gradient over all parameters.
    """

    def __init__(self, gradients: RecordGradients, max_grad_norm: float) -> None:
        self.gradients = gradients
        self.max_grad_norm = max_grad_norm
        self._sums: dict[str, Tensor] = {}
        self._warned = False

    def add_chunk(self, num_records: int) -> None:
        """Takes the rows of the last backward pass, clips them and adds them; 0 records add nothing.

        Raises:
            UnsupportedModelError: There is not exactly one row for each record.
        """
        rows = self.gradients.take_rows(num_records or None)
        if num_records == 0:
            return
        sums, _ = clipped_sum(list(rows.values()), self.max_grad_norm) if rows else ([], None)
        for name, value in zip(rows, sums, strict=True):
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def flatten(self) -> Tensor:
        """The sum as one vector, in the order of the parameters, and forgets it; parameters without rows give zeros."""
        sums, self._sums = self._sums, {}
        self._warn_unused([name for name in self.gradients.parameters if name not in sums])
        flat = []
        for name, parameter in self.gradients.parameters.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            value = sums[name] if name in sums else torch.zeros_like(parameter)
            flat.append(value.detach().to(dtype).flatten())
        return torch.cat(flat)

    def _warn_unused(self, names: list[str]) -> None:
        if names and len(names) < len(self.gradients.parameters) and not self._warned:
            self._warned = True
            warnings.warn(
                f"No record of this update has a gradient for {', '.join(f'`{n}`' for n in names)}: it receives noise"
                " only, since whether a parameter is used may depend on the data. Freeze what the loss does not use.",
                UserWarning,
                stacklevel=2,
            )

    def reset(self) -> None:
        """Forgets what has been added."""
        self._sums = {}


def add_noise(total: Tensor, *, scale: float, stream: KeyStream, index: int) -> Tensor:
    """Adds Gaussian noise of standard deviation ``scale`` to a vector, from the stretch ``index`` of ``stream``."""
    if scale == 0:
        return total
    noise = standard_normal(stream, index, total.numel()).mul_(scale)
    return total + noise.to(device=total.device, dtype=total.dtype)


def set_gradients(gradients: RecordGradients, flat: Tensor) -> None:
    """Writes a vector as the gradients of the trainable parameters, in their own shapes and types."""
    start = 0
    for parameter in gradients.parameters.values():
        piece = flat[start : start + parameter.numel()]
        parameter.grad = piece.view_as(parameter).to(parameter.dtype).clone()
        start += parameter.numel()
