"""What every gradient engine can do: hand out the clipped sum of a batch, and nothing raw."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor, nn

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.clipping import Clipping
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.gradients.layers.pressed import press


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name; a shared one once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


class GradientEngine(ABC):
    """Watches a module from :meth:`attach` to :meth:`detach`; its loss must be a mean over the records of the batch.

    In-place activations are switched off meanwhile: they overwrite what layers put out and were given.

    Args:
        module: The module, on its device.

    Attributes:
        parameters: What is trained, by name, since the last :meth:`attach`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters: dict[str, nn.Parameter] = {}
        self._inplace: list[nn.Module] = []

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
        self._inplace = [layer for layer in self.module.modules() if getattr(layer, "inplace", False) is True]
        for layer in self._inplace:
            layer.inplace = False  # type: ignore[assignment]

    def detach(self) -> None:
        """Leaves the module as it was, without anything that was stored; safe to call at any time."""
        for layer in self._inplace:
            layer.inplace = True  # type: ignore[assignment]
        self._inplace = []

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

    def _explain(self, name: str) -> str:
        path, _, leaf = name.rpartition(".")
        layer = self.module.get_submodule(path)
        owner = f"module `{path}` ({type(layer).__name__})" if path else "the LightningModule"
        return (
            f"`{name}` is used outside the forward of {owner}, or gets its gradient in several backward passes, so one"
            f" record's share cannot be bounded. {_replacement(layer, path)}Call the module instead of reading its"
            f" parameter `{leaf}`, run one backward pass a step, or freeze the parameter."
        )


def _replacement(layer: nn.Module, path: str) -> str:
    """What to write in place of layers that compute on their parameters in one go."""
    for kind, other in _REPLACEMENTS:
        if isinstance(layer, kind):
            return f"Replace `{path}` by `{other}`, which has one module for each product. "
    return ""


_REPLACEMENTS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.MultiheadAttention, "opacus.layers.DPMultiheadAttention"),
    (nn.LSTM, "opacus.layers.DPLSTM"),
    (nn.GRU, "opacus.layers.DPGRU"),
    (nn.RNN, "opacus.layers.DPRNN"),
)


def explain_rows(name: str, found: int, num_records: int) -> str:
    """The message for rows that are no records."""
    return (
        f"`{name}` has {found} gradient rows for {num_records} records: `training_step` drops, repeats, splits or"
        " merges records. Keep records in the first dimension of every layer's input."
    )


def explain_inputs(path: str, layer: nn.Module, found: int, num_rows: int) -> str:
    """The message for a layer whose input does not hold one row per record."""
    return (
        f"`{path}` ({type(layer).__name__}) was given {found} rows for {num_rows} records: `training_step` drops,"
        " repeats, splits or merges records. Keep all records in the first dimension of every layer's input, and weight"
        " by 0 what shall not count."
    )
