"""Per-record gradients of an unedited module through Opacus' hooks, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn

from lightning_dp import _compat
from lightning_dp.errors import UnsupportedModelError


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; a shared one once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class RecordGradients:
    """Attaches Opacus' hooks to a module and hands out one gradient row per record after each backward pass.

    Hooks live from :meth:`attach` to :meth:`detach`. If parameters are frozen or unfrozen in between,
    :meth:`refresh` attaches anew. In-place activations are switched off meanwhile, since hooks cannot see their input.

    Args:
        module: The module, on its device; its loss must be a mean over the records of the batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters: dict[str, nn.Parameter] = {}
        self._hooks: GradSampleHooks | None = None
        self._inplace: list[nn.Module] = []

    def attach(self) -> None:
        """Attaches the hooks to every layer with a parameter that requires a gradient.

        Raises:
            UnsupportedModelError: Nothing can be trained, or a layer cannot be separated into records.
        """
        self.parameters = trainable(self.module)
        if not self.parameters:
            raise UnsupportedModelError(
                f"No parameter of `{type(self.module).__name__}` requires a gradient, so there is nothing to train."
                " Unfreeze at least one with `requires_grad_(True)`."
            )
        self._check_mode()
        self._inplace = [layer for layer in self.module.modules() if getattr(layer, "inplace", False) is True]
        for layer in self._inplace:
            layer.inplace = False  # type: ignore[assignment]
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
                    raise UnsupportedModelError(
                        f"`{path}` ({type(layer).__name__}) was given {min(sizes - {num_rows})} rows for {num_rows}"
                        " records: `training_step` drops, repeats, splits or merges records. Keep all records in the"
                        " first dimension of every layer's input, and weight by 0 what shall not count."
                    )

    @property
    def is_attached(self) -> bool:
        """Whether the hooks are in place."""
        return self._hooks is not None

    def refresh(self) -> None:
        """Attaches anew if the set of trainable parameters has changed since."""
        # PRIVACY: a layer that was unfrozen after the hooks were attached has no rows and would train on raw gradients.
        if {id(p) for p in trainable(self.module).values()} != {id(p) for p in self.parameters.values()}:
            self.detach()
            self.attach()

    def detach(self) -> None:
        """Removes the hooks and everything that they stored; safe to call at any time."""
        if self._hooks is not None:
            self._hooks.cleanup()
            self._hooks = None
        _compat.forget_hooks(self.module)
        for layer in self._inplace:
            layer.inplace = True  # type: ignore[assignment]
        self._inplace = []

    def take_rows(self, num_records: int | None = None) -> dict[str, Tensor]:
        """Removes the gradients of the last backward pass from the module and returns the rows.

        Args:
            num_records: How many rows each parameter must have; not checked if ``None``.

        Returns:
            ``(records, *parameter_shape)`` in at least float32 for each parameter that took part, by name.

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
                rows[name] = row.to(torch.promote_types(row.dtype, torch.float32))
        _compat.forget_forward(self.module)
        uncovered += self._take_strays()
        if uncovered:
            raise UnsupportedModelError(self._explain(uncovered[0]))
        for name, row in rows.items():
            # PRIVACY: a batch that was filtered, repeated or flattened has rows that are no records.
            if num_records is not None and row.shape[0] != num_records:
                raise UnsupportedModelError(
                    f"`{name}` has {row.shape[0]} gradient rows for {num_records} records: `training_step` drops,"
                    " repeats, splits or merges records. Keep records in the first dimension of every layer's input."
                )
        return rows

    def _take_strays(self) -> list[str]:
        """Clears the gradients of parameters that have no hooks; names those that the last backward pass wrote."""
        strays = [(name, p) for name, p in self.module.named_parameters() if p.grad is not None]
        for _, parameter in strays:
            parameter.grad = None
        return [name for name, parameter in strays if parameter.requires_grad]

    def _explain(self, name: str) -> str:
        path, _, leaf = name.rpartition(".")
        owner = f"module `{path}` ({type(self.module.get_submodule(path)).__name__})" if path else "the LightningModule"
        return (
            f"`{name}` gets a gradient that does not belong to exactly one forward of {owner} in this step, so one"
            f" record's share cannot be bounded. Call the module instead of reading its parameter `{leaf}`, run extra"
            " forwards under `torch.no_grad()`, run one backward a step, or freeze the parameter."
        )

    def drop_raw(self) -> None:
        """Deletes every gradient, after a backward pass that was interrupted before they were clipped."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def raw_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that ``backward`` left, by name; for comparing them with the rows."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                yield name, parameter.grad
