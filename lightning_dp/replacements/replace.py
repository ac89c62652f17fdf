"""Puts layers whose records can be told apart in the place of those whose cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from lightning_dp._compat import BatchNorm
from lightning_dp.errors import UnsupportedModelError
from lightning_dp.replacements.attention import SeparableAttention
from lightning_dp.replacements.normalization import GroupNormForBatchNorm
from lightning_dp.replacements.recurrent import SeparableRecurrence

_REPLACEMENTS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.MultiheadAttention: SeparableAttention,
    nn.LSTM: SeparableRecurrence,
    nn.GRU: SeparableRecurrence,
    nn.RNN: SeparableRecurrence,
}


def replace_unsupported(module: nn.Module) -> dict[str, str]:
    """Replaces, in place, layers that mix records or compute on their parameters in one go.

    ``LSTM``, ``GRU``, ``RNN`` and ``MultiheadAttention`` become modules with the same weights, the same outputs up to
    rounding, and the same entries in ``state_dict()``, which load into the original class. ``BatchNorm`` becomes a
    ``GroupNorm`` with other outputs, since those of a ``BatchNorm`` depend on the batch; its ``state_dict()`` loads
    into the original class, too, but there it has to be replaced again before it is used.

    A layer that is frozen and in eval mode is left alone, and so are subclasses, which may compute something else.

    Args:
        module: The model, before an optimizer has its parameters.

    Returns:
        What was replaced: the kind of the original, by its path.

    Raises:
        UnsupportedModelError: A layer has no replacement.

    Example:
        >>> from torch import nn
        >>> from lightning_dp import replace_unsupported
        >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        >>> replace_unsupported(model)
        {'1': 'BatchNorm2d'}
        >>> model[1].num_groups
        4
    """
    replaced, made = {}, {}  # by path; by layer, which may stand in several places
    owners = Counter(id(parameter) for layer in module.modules() for parameter in layer.parameters(recurse=False))
    for path, layer in list(module.named_modules(remove_duplicate=False)):
        make = _replacement(layer)
        if make is None or not path:
            continue
        if id(layer) not in made:
            _check_unshared(path, layer, owners)
            made[id(layer)] = make(layer).train(layer.training)
            replaced[path] = type(layer).__name__
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, made[id(layer)])
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # a way around the forward pass of its layers
    return replaced


def _replacement(layer: nn.Module) -> Callable[..., nn.Module] | None:
    is_trained = layer.training or any(parameter.requires_grad for parameter in layer.parameters())
    if not is_trained:
        return None
    return GroupNormForBatchNorm if isinstance(layer, BatchNorm) else _REPLACEMENTS.get(type(layer))


def _check_unshared(path: str, layer: nn.Module, owners: Counter[int]) -> None:
    if isinstance(layer, nn.MultiheadAttention):
        for name, parameter in layer.named_parameters(recurse=False):
            if owners[id(parameter)] > 1:
                raise UnsupportedModelError(
                    f"`{path}.{name}` is shared with another layer, and its replacement would be split into parts that"
                    " are not. Share the whole module in place of its parameter."
                )
