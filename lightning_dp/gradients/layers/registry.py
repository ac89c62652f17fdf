"""Which function knows the per-record gradients of which layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.layers.use import Use


class Casting(NamedTuple):
    """In which types a forward pass ran.

    Attributes:
        device: Kind of the device.
        dtype: Type of products under autocast; None without autocast.
        eps: Relative rounding error of one product.
    """

    device: str
    dtype: torch.dtype | None
    eps: float

    @classmethod
    def current(cls, like: Tensor) -> Casting:
        """What holds now for products on the device of ``like``."""
        device = like.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            return cls(device, dtype, torch.finfo(dtype).eps)
        eps = torch.finfo(like.dtype).eps
        if torch.get_float32_matmul_precision() == "medium":
            eps = max(eps, torch.finfo(torch.bfloat16).eps)
        elif device == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            eps = max(eps, 2.0**-10)
        return cls(device, None, eps)

    def again(self) -> AbstractContextManager[object]:
        """Casts in the same way once more."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


class LayerForward(NamedTuple):
    """One forward pass of a layer, seen from its backward pass.

    Attributes:
        layer: The layer.
        inputs: What it was called with, without history, in the order of its parameters.
        gradient: Gradient of the loss with respect to its output, ``(records, ...)``.
        wanted: Names of the layer's own parameters that are trained.
        path: Where the layer is, for names of workspaces and for errors.
        keywords: What it was called with and has no position, by name.
        output: What it put out, without history; kept only for layers without a function of their own.
        casting: In which types it ran; likewise.
    """

    layer: Any
    inputs: Sequence[Any]
    gradient: Tensor
    wanted: frozenset[str]
    path: str
    keywords: Mapping[str, Any] = {}
    output: Tensor | None = None
    casting: Casting | None = None


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


def is_patched(layer: nn.Module) -> bool:
    """Whether somebody replaced the forward pass of this one layer, so that its kind says nothing about it."""
    return "forward" in vars(layer)


def own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a layer's own forward pass uses, by name.

    Also those of modules in it that have no forward pass, such as ``nn.ParameterList``, and of parametrizations, whose
    forward pass is given no record.
    """
    own = dict(layer.named_parameters(recurse=False))
    for name, child in layer.named_children():
        if _is_parametrizing(layer, name):
            own.update(child.named_parameters(name))
        elif has_no_forward(child) and not _has_function(layer):
            own.update({f"{name}.{leaf}": parameter for leaf, parameter in own_parameters(child).items()})
    return own


def is_part(root: nn.Module, path: str) -> bool:
    """Whether the parameters of the module at ``path`` are :func:`own_parameters` of one above it."""
    names = path.split(".") if path else []
    layers = [root, *(root.get_submodule(".".join(names[: i + 1])) for i in range(len(names)))]
    if any(_is_parametrizing(layer, name) for layer, name in zip(layers, names, strict=False)):
        return True
    return len(layers) > 1 and has_no_forward(layers[-1]) and not _has_function(layers[-2])


def _is_parametrizing(layer: nn.Module, name: str) -> bool:
    return name == "parametrizations" and is_parametrized(layer)


def has_no_forward(layer: nn.Module) -> bool:
    """Whether a module only holds parameters or other modules."""
    return type(layer).forward is nn.Module.forward and not is_patched(layer)


def _has_function(layer: nn.Module) -> bool:
    return known_gradients(layer) is not None or type(layer) in GradSampleModule.GRAD_SAMPLERS


def known_gradients(layer: nn.Module) -> LayerGradients | None:
    """The function for this kind of layer; a sampler that somebody else registered with Opacus goes first."""
    kind = type(layer)
    if is_patched(layer):
        return None
    sampler = GradSampleModule.GRAD_SAMPLERS.get(kind)
    foreign = sampler is not None and not sampler.__module__.startswith("opacus.")
    return None if foreign else _REGISTERED.get(kind)


def without_batch(forward: LayerForward) -> UnsupportedModelError:
    """The error for an input that has no dimension for records."""
    return UnsupportedModelError(
        f"`{forward.path}` ({type(forward.layer).__name__}) was given one record without a batch dimension, so its"
        " channels would be taken for records. Add the dimension with `x.unsqueeze(0)`."
    )
