"""Layers without a function of our own: samplers registered with Opacus, and vectorized backward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from lightning_dp import _compat
from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.layers.registry import LayerForward, is_patched
from lightning_dp.gradients.layers.use import Rows, Use


def has_sampler(layer: nn.Module) -> bool:
    """Whether a sampler is registered with Opacus for exactly this kind of layer."""
    return type(layer) in GradSampleModule.GRAD_SAMPLERS and not is_patched(layer)


def by_sampler(forward: LayerForward) -> dict[str, Use]:
    """Rows from the sampler that is registered with Opacus for this kind of layer."""
    sampler = GradSampleModule.GRAD_SAMPLERS[type(forward.layer)]
    names = {id(parameter): name for name, parameter in forward.layer.named_parameters(recurse=False)}
    rows = sampler(forward.layer, [x for x in forward.inputs if isinstance(x, Tensor)], forward.gradient)
    return {names[id(p)]: Rows(row) for p, row in rows.items() if names.get(id(p)) in forward.wanted}


def by_vectorized_backward(forward: LayerForward) -> dict[str, Use]:
    """Rows from running forward and backward of the layer again, one record at a time in one vectorized pass.

    An argument after the first that is as long as the batch may hold one row for each record, or something else, such
    as a mask over as many positions. The output tells which.

    Raises:
        UnsupportedModelError: The layer draws random numbers, writes in place, or cannot be vectorized otherwise.
    """
    layer = forward.layer
    if forward.gradient.dim() == 0:
        raise UnsupportedModelError(
            f"`{forward.path}` ({type(layer).__name__}) has parameters of its own and puts out one number for the whole"
            " batch, so the gradient of one record cannot be separated in it. Let it put out one row for each record,"
            " and average outside, or freeze its parameters."
        )
    records = len(forward.gradient)
    arguments = list(forward.inputs), dict(forward.keywords)
    long = [*(_has(records, x) for x in arguments[0]), *(_has(records, x) for x in arguments[1].values())]
    first = [many and not any(long[:i]) for i, many in enumerate(long)]
    reason = "it does not put out the same when it runs again on one record at a time."
    for batched in [long] if first == long else [long, first]:
        try:
            found, output = _rerun(forward, arguments, batched)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            # Said by torch in words that name its own flags.
            drawn = "random operation" in str(error)
            reason = (
                "its forward pass draws random numbers (dropout), which cannot be drawn again." if drawn else str(error)
            )
            continue
        # PRIVACY: rows of another computation than the one that the loss depends on would bound nothing.
        if _same(output, forward):
            return {name: Rows(row) for name, row in found.items()}
    raise UnsupportedModelError(
        f"The gradient of one record cannot be separated in `{forward.path}` ({type(layer).__name__}), which has"
        f" parameters of its own: {reason} Put them into a small module of their own, register the layer with"
        " `lightning_dp.register_layer`, or freeze them."
    )


def _has(records: int, value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == records


def _rerun(
    forward: LayerForward, arguments: tuple[list[Any], dict[str, Any]], batched: list[bool]
) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of each trained parameter, and the output.

    Args:
        forward: The pass to run again.
        arguments: Those by position and those by name.
        batched: Which of them hold one row for each record.
    """
    layer = forward.layer
    trained = {name: layer.get_parameter(name).detach() for name in forward.wanted}
    by_position, by_name = batched[: len(arguments[0])], batched[len(arguments[0]) :]
    names = dict(zip(arguments[1], by_name, strict=True))

    def rows(inputs: list[Any], keywords: Mapping[str, Any], gradient: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        args = tuple(x.unsqueeze(0) if many else x for x, many in zip(inputs, by_position, strict=True))
        kwargs = {name: x.unsqueeze(0) if names[name] else x for name, x in keywords.items()}

        def output(parameters: dict[str, Tensor]) -> Tensor:
            # PRIVACY: a child may hold the same parameter under another name, and counts its own use of it.
            result: Tensor = functional_call(layer, parameters, args, kwargs, tie_weights=False)
            return result

        result, backward, *_ = vjp(output, trained)
        found: dict[str, Tensor] = backward(gradient.unsqueeze(0).to(result.dtype))[0]
        return found, result.squeeze(0)

    in_dims = [0 if many else None for many in by_position], {n: 0 if many else None for n, many in names.items()}, 0
    with forward.casting.again() if forward.casting is not None else nullcontext(), _compat.fresh_weights():
        found, output = vmap(rows, in_dims=in_dims)(*arguments, forward.gradient)
    return found, output


def _same(output: Tensor, forward: LayerForward) -> bool:
    """Whether each record's output is what the layer put out before, up to rounding; also where it is not finite."""
    expected = forward.output
    if expected is None:
        return True
    if output.shape != expected.shape:
        return False
    eps = forward.casting.eps if forward.casting is not None else torch.finfo(expected.dtype).eps
    expected, output = (x.detach().to(torch.float64).reshape(len(x), -1) for x in (expected, output))
    finite = torch.isfinite(expected)
    if bool((torch.isfinite(output) & ~finite).any()):
        return False
    largest = expected.abs().where(finite, 0).amax(1, keepdim=True) if expected.numel() else expected
    difference = (output - expected).where(finite, 0)
    return bool((difference.abs() <= math.sqrt(eps) * largest).all())
