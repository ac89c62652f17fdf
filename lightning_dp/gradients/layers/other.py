"""Layers without a function of our own: samplers registered with Opacus, and vectorized backward passes."""

from __future__ import annotations

from typing import Any

from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.layers.registry import LayerForward
from lightning_dp.gradients.layers.use import Rows, Use


def has_sampler(layer: nn.Module) -> bool:
    """Whether a sampler is registered with Opacus for exactly this kind of layer."""
    return type(layer) in GradSampleModule.GRAD_SAMPLERS


def by_sampler(forward: LayerForward) -> dict[str, Use]:
    """Rows from the sampler that is registered with Opacus for this kind of layer."""
    sampler = GradSampleModule.GRAD_SAMPLERS[type(forward.layer)]
    names = {id(parameter): name for name, parameter in forward.layer.named_parameters(recurse=False)}
    rows = sampler(forward.layer, [x for x in forward.inputs if isinstance(x, Tensor)], forward.gradient)
    return {names[id(p)]: Rows(row) for p, row in rows.items() if names.get(id(p)) in forward.wanted}


def by_vectorized_backward(forward: LayerForward) -> dict[str, Use]:
    """Rows from running forward and backward of the layer again, one record at a time in one vectorized pass.

    Raises:
        UnsupportedModelError: The layer draws random numbers, writes in place, or cannot be vectorized otherwise.
    """
    layer = forward.layer
    own = dict(layer.named_parameters(recurse=False))
    trained = {name: own[name].detach() for name in forward.wanted}
    batched = [isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(forward.gradient) for x in forward.inputs]

    def rows(inputs: list[Any], gradient: Tensor) -> dict[str, Tensor]:
        arguments = tuple(x.unsqueeze(0) if many else x for x, many in zip(inputs, batched, strict=True))

        def output(parameters: dict[str, Tensor]) -> Tensor:
            result: Tensor = functional_call(layer, parameters, arguments)
            return result

        result, backward, *_ = vjp(output, trained)
        found: dict[str, Tensor] = backward(gradient.unsqueeze(0).to(result.dtype))[0]
        return found

    try:
        found = vmap(rows, in_dims=([0 if many else None for many in batched], 0))(
            list(forward.inputs), forward.gradient
        )
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise UnsupportedModelError(
            f"The gradient of one record cannot be separated in `{forward.path}` ({type(layer).__name__}), which has"
            f" parameters of its own: {error} Put them into a small module of their own, register the layer with"
            " `lightning_dp.register_layer`, or freeze them."
        ) from error
    return {name: Rows(row) for name, row in found.items()}
