"""Which function knows the per-record gradients of which layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

from lightning_dp.gradients.layers.use import Use


class LayerForward(NamedTuple):
    """One forward pass of a layer, seen from its backward pass.

    Attributes:
        layer: The layer.
        inputs: What it was called with, without history, in the order of its parameters.
        gradient: Gradient of the loss with respect to its output, ``(records, ...)``.
        wanted: Names of the layer's own parameters that are trained.
        path: Where the layer is, for names of workspaces and for errors.
    """

    layer: Any
    inputs: Sequence[Any]
    gradient: Tensor
    wanted: frozenset[str]
    path: str


LayerGradients = Callable[[LayerForward], dict[str, Use]]

_REGISTERED: dict[type[nn.Module], LayerGradients] = {}
_F = TypeVar("_F", bound=LayerGradients)


def register_layer(*kinds: type[nn.Module]) -> Callable[[_F], _F]:
    """Registers a function that gives, for one forward pass, the uses of the layer's own parameters.

    Args:
        kinds: The layers; a subclass may compute something else, so it needs a registration of its own.
    """

    def register(function: _F) -> _F:
        _REGISTERED.update(dict.fromkeys(kinds, function))
        return function

    return register


def known_gradients(layer: nn.Module) -> LayerGradients | None:
    """The function for this kind of layer; a sampler that somebody else registered with Opacus goes first."""
    kind = type(layer)
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
    foreign = sampler is not None and not sampler.__module__.startswith("opacus.")
    return None if foreign else _REGISTERED.get(kind)
