"""What every gradient engine can do: hand out the clipped sum of a batch, and nothing raw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.clipping import Clipping
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.gradients.layers import has_no_forward
from lightning_dp.gradients.layers.pressed import press


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; a shared one once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class GradientEngine(ABC):
    """Watches a module from :meth:`attach` to :meth:`detach`; its loss must be a mean over the records of the batch.

    In-place activations are switched off meanwhile: they overwrite what layers put out and were given. Tables that are
    given one row of indices for the whole batch get one for each record.

    Args:
        module: The module, on its device.

    Attributes:
        parameters: What is trained, by name, since the last :meth:`attach`.
        no_tensors: Layers that put out something else than a tensor, and what.
        num_rows: Number of records that the next forward pass sees, null records included; None if that is not known.
        spread: Tables that were given one row of indices for the whole batch.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters: dict[str, nn.Parameter] = {}
        self.no_tensors: dict[str, str] = {}
        self.num_rows: int | None = None
        self.spread: set[str] = set()
        self._inplace: list[nn.Module] = []
        self._before: list[RemovableHandle] = []

    @property
    @abstractmethod
    def is_attached(self) -> bool:
        """Whether the module is watched."""

    @property
    def is_frugal(self) -> bool:
        """Whether memory is given back between updates, though fresh memory is slow."""
        return False

    def attach(self) -> None:
        """Starts to watch every layer with a parameter that requires a gradient.

        Raises:
            UnsupportedModelError: Nothing can be trained, or a layer cannot be separated into records.
        """
        self.parameters = trainable(self.module)
        if not self.parameters:
            raise UnsupportedModelError(
                f"No parameter of `{type(self.module).__name__}` requires a gradient, so there is nothing to train."
                " Unfreeze at least one with `requires_grad_(True)`."
            )
        for name, parameter in self.parameters.items():
            if is_lazy(parameter):
                raise UnsupportedModelError(
                    f"`{name}` has no shape yet: its layer is lazy and waits for a first batch, which would be private."
                    " Run the module on a batch of zeros before training, or give the layer its sizes."
                )
            if parameter.is_complex():
                raise UnsupportedModelError(
                    f"`{name}` is complex ({parameter.dtype}), and norms and noise are those of real numbers. Hold its"
                    " real and imaginary parts in one real parameter and use `torch.view_as_complex`, or freeze it."
                )
        self._inplace = [layer for layer in self.module.modules() if getattr(layer, "inplace", False) is True]
        for layer in self._inplace:
            layer.inplace = False  # type: ignore[assignment]
        for path, layer in self.module.named_modules():
            if isinstance(layer, nn.Embedding) and layer.weight.requires_grad:
                self._before.append(layer.register_forward_pre_hook(partial(self._look_up_for_each, path)))

    def detach(self) -> None:
        """Leaves the module as it was, without anything that was stored; safe to call at any time."""
        for layer in self._inplace:
            layer.inplace = True  # type: ignore[assignment]
        self._inplace = []
        for handle in self._before:
            handle.remove()
        self._before = []

    def _look_up_for_each(self, path: str, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Makes one row of indices, as of positions, one for each record; what is looked up is broadcast otherwise."""
        if self.num_rows is None or not args or args[0].dim() < 2 or len(args[0]) != 1:
            return None
        self.spread.add(path)
        return args[0].expand(self.num_rows, *args[0].shape[1:]), *args[1:]

    def refresh(self) -> None:
        """Attaches anew if the set of trainable parameters has changed since."""
        # PRIVACY: a layer that was unfrozen later is not watched yet and would train on raw gradients.
        if {id(p) for p in trainable(self.module).values()} != {id(p) for p in self.parameters.values()}:
            self.detach()
            self.attach()

    @abstractmethod
    def check_inputs(self, num_rows: int) -> None:
        """Checks that every layer was given one row per record.

        Raises:
            UnsupportedModelError: A layer saw only some of the records, or something else in its first dimension.
        """

    def prepare(self, loss: Tensor) -> None:  # noqa: B027  # not every engine has something to look at
        """Looks at a loss before its backward pass.

        Raises:
            UnsupportedModelError: A parameter is used where the gradient of one record cannot be seen.
        """

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass in the cheapest way that this engine has; any other way gives the same."""
        loss.backward()  # type: ignore[no-untyped-call]

    @abstractmethod
    def add_clipped(self, total: FlatGradient, num_records: int, clipping: Clipping) -> Tensor:
        """Clips the gradient of each record of the last backward pass and adds them up.

        A record whose gradient is not finite is dropped: it adds nothing, and no other record changes by it.

        Args:
            total: What the sum is added to.
            num_records: Records of the batch, at least 1.
            clipping: How much of each record's gradient stays.

        Returns:
            The norms before clipping, ``(num_records,)``.

        Raises:
            UnsupportedModelError: A parameter's gradient is not made of one row for each record.
        """

    @abstractmethod
    def take_rows(self, num_records: int | None = None, *, pressed: bool = False) -> dict[str, Tensor]:
        """Removes what the last backward pass left and returns the gradient of each record.

        Args:
            num_records: How many rows each parameter must have; not checked if ``None``.
            pressed: Whether to press parameters with many rows into few, see :func:`press`, to compare gradients that
                are too large to be written out.

        Returns:
            ``(records, *parameter_shape)`` in at least float32 for each parameter that took part, by name.

        Raises:
            UnsupportedModelError: A parameter's gradient is not made of one row for each record.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drops everything that the last forward and backward pass left."""

    def drop_raw(self) -> None:
        """Deletes every gradient, after a backward pass that was interrupted before they were clipped."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def raw_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that ``loss.backward()`` left, pressed, by name; for comparing them with pressed rows."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                yield name, press(gradient, 0) if gradient.dim() > 1 else gradient

    def _take_strays(self) -> list[str]:
        """Clears every raw gradient; names trained parameters that are not watched."""
        strays = [(name, p) for name, p in self.module.named_parameters() if p.grad is not None]
        for _, parameter in strays:
            parameter.grad = None
        return [name for name, parameter in strays if parameter.requires_grad and name not in self.parameters]

    def _check_rows(self, name: str, found: int, num_records: int) -> None:
        """Checks that a gradient has one row for each record.

        Raises:
            UnsupportedModelError: It has not.
        """
        # PRIVACY: a batch that was filtered, repeated or flattened has rows that are no records.
        if found == num_records:
            return
        raise UnsupportedModelError(
            f"`{name}` has {found} gradient rows for {num_records} records: `training_step` drops, repeats, splits or"
            " merges records. Keep records in the first dimension of every layer's input, pad sequences instead of"
            " packing them, or freeze the parameter. What is not of these records, such as a public batch, may go"
            f" through it under `torch.no_grad()` only.{_look_up(self.module, name)}"
        )

    def _explain(self, name: str) -> str:
        path = name.rpartition(".")[0]
        while path and has_no_forward(self.module.get_submodule(path)):
            path = path.rpartition(".")[0]
        layer, leaf = self.module.get_submodule(path), name.removeprefix(f"{path}.")
        if not path:
            return (
                f"`{name}` is a parameter of {type(self.module).__name__} itself and is used outside its `forward`, for"
                " example in `training_step`, or gets its gradient in several backward passes, so one record's share"
                f" cannot be bounded. Move `{name}` into a small module whose forward takes one row for each record and"
                " uses it, and call that module; run one backward pass a step; or freeze it."
            )
        owner = f"module `{path}` ({type(layer).__name__})"
        if path in self.no_tensors:
            return (
                f"`{name}` is used in the forward of {owner}, which puts out a {self.no_tensors[path]}, so one record's"
                f" share cannot be bounded. {_replacement(layer, path)}Let the module put out one tensor with one row"
                f" for each record, or move `{leaf}` into a small module that does, or freeze the parameter."
            )
        return (
            f"`{name}` is used outside the forward of {owner}, or gets its gradient in several backward passes, so one"
            f" record's share cannot be bounded. {_replacement(layer, path)}Call the module instead of reading its"
            f" parameter `{leaf}`, run one backward pass a step, or freeze the parameter."
        )


def _replacement(layer: nn.Module, path: str) -> str:
    """What to write in place of layers that compute on their parameters in one go."""
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        return f"Let `PrivateStrategy(replace_unsupported=True)` replace `{path}`, with the same outputs. "
    return ""


def _look_up(module: nn.Module, name: str) -> str:
    """What to write where a table is given indices for the whole batch."""
    path = name.rpartition(".")[0]
    if not isinstance(module.get_submodule(path), nn.Embedding):
        return ""
    return f" Positions that all records share are one row of indices: `{path}(torch.arange(length)[None])`."


def explain_inputs(path: str, layer: nn.Module, found: int, num_rows: int) -> str:
    """The message for a layer whose input does not hold one row per record."""
    return (
        f"`{path}` ({type(layer).__name__}) was given {found} rows for {num_rows} records: `training_step` drops,"
        " repeats, splits or merges records. Keep all records in the first dimension of every layer's input, and weight"
        " by 0 what shall not count."
    )
