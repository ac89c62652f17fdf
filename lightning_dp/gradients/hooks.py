"""One gradient row per record through Opacus' hooks: the plain engine, for diagnostics and as the reference."""

from __future__ import annotations

import torch
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn

from lightning_dp import _compat
from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.clipping import Clipping, clipped_sum
from lightning_dp.gradients.engine import GradientEngine, explain_inputs
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.gradients.layers.pressed import press


class HookEngine(GradientEngine):
    """Writes out the gradient of every record. Slow and large; see :class:`BookKeepingEngine`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._hooks: GradSampleHooks | None = None

    def attach(self) -> None:
        """Attaches Opacus' hooks to every layer with a parameter that requires a gradient.

        Raises:
            UnsupportedModelError: Nothing can be trained, or a layer cannot be separated into records.
        """
        super().attach()
        self._check_mode()
        _compat.silence_hook_warning()
        try:
            self._hooks = GradSampleHooks(self.module, strict=False, loss_reduction="mean")
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"The gradient of one record cannot be separated in `{type(self.module).__name__}`: {error}"
                " Replace the layer, or freeze it."
            ) from error

    def _check_mode(self) -> None:
        for path, layer in self.module.named_modules():
            own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            if own and not layer.training:
                raise UnsupportedModelError(
                    f"`{path}` ({type(layer).__name__}) is to be trained but is in eval mode, in which no per-record"
                    " gradients are computed. Call `.train()` on it before training, or freeze it with"
                    " `requires_grad_(False)`."
                )

    def check_inputs(self, num_rows: int) -> None:
        """Checks that every layer was given one row per record.

        Raises:
            UnsupportedModelError: A layer saw only some of the records, or something else in its first dimension.
        """
        for path, layer in self.module.named_modules():
            for inputs in getattr(layer, "activations", ()):
                shown = inputs[-1:] if isinstance(layer, nn.EmbeddingBag) else inputs
                sizes = {tensor.shape[0] for tensor in shown if tensor.dim() > 0}
                # PRIVACY: rows of a part of the batch would be booked to its first records, whoever they are.
                if sizes - {num_rows}:
                    raise UnsupportedModelError(explain_inputs(path, layer, min(sizes - {num_rows}), num_rows))

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in place."""
        return self._hooks is not None

    def detach(self) -> None:
        """Removes the hooks and everything that they stored; safe to call at any time."""
        if self._hooks is not None:
            self._hooks.cleanup()
            self._hooks = None
        _compat.forget_hooks(self.module)
        super().detach()

    def add_clipped(self, total: FlatGradient, num_records: int, clipping: Clipping) -> Tensor:
        """Clips the rows of the last backward pass and adds them up; see :class:`GradientEngine`."""
        rows = self.take_rows(num_records)
        if not rows:
            return torch.zeros(num_records)
        sums, norms = clipped_sum(rows, clipping, self.parameters)
        for name, value in sums.items():
            total.views[name].add_(value)
        total.used.update(rows)
        return norms

    def take_rows(self, num_records: int | None = None, *, pressed: bool = False) -> dict[str, Tensor]:
        """Removes the gradients of the last backward pass and returns the rows; see :class:`GradientEngine`.

        Raises:
            UnsupportedModelError: A parameter has a gradient but no rows, rows of several backward passes, or another
                number of rows.
        """
        rows: dict[str, Tensor] = {}
        uncovered: list[str] = []
        for name, parameter in self.parameters.items():
            row, gradient = parameter.grad_sample, parameter.grad  # type: ignore[attr-defined]
            # PRIVACY: no raw gradient outlives the backward pass, whatever is raised below.
            parameter.grad, parameter.grad_sample = None, None  # type: ignore[attr-defined]
            if isinstance(row, list) or (row is None and gradient is not None):
                uncovered.append(name)
            elif row is not None:
                row = row.to(torch.promote_types(row.dtype, torch.float32))
                rows[name] = press(row, 1) if pressed and row.dim() > 2 else row
        _compat.forget_forward(self.module)
        uncovered += self._take_strays()
        if uncovered:
            raise UnsupportedModelError(self._explain(uncovered[0]))
        for name, row in rows.items():
            if num_records is not None:
                self._check_rows(name, row.shape[0], num_records)
        return rows

    def forget(self) -> None:
        """Drops rows, stored inputs and raw gradients."""
        for parameter in self.parameters.values():
            parameter.grad, parameter.grad_sample = None, None  # type: ignore[attr-defined]
        _compat.forget_forward(self.module)
        self._take_strays()
