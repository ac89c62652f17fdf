"""The clipping rules."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp import _validate
from lightning_dp.errors import InvalidValueError
from lightning_dp.gradients.clipping import ClippingRule

_FURTHEST = 1.0  # that one update moves the logarithm of an adaptive clip norm


@dataclass(frozen=True)
class FlatClipping(ClippingRule):
    """One bound over all parameters together: the factor is ``min(1, max_grad_norm / norm)``. The default.

    Source: Abadi et al., Deep Learning with Differential Privacy (2016), Algorithm 1.
    """

    @override
    def factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        return (bounds / norms).clamp(max=1.0)

    @override
    def describe(self, max_norm: float, parameters: Collection[str]) -> str:
        return f"{max_norm:g} (flat, over all parameters)"


@dataclass(frozen=True)
class AutomaticClipping(ClippingRule):
    """Scales every record's gradient to about ``max_grad_norm``, by ``max_grad_norm / (norm + stability)``.

    There is no clip norm to tune, since it only multiplies the learning rate: keep ``max_grad_norm=1`` and tune that.
    Small gradients are scaled up, which changes what is optimised; a larger ``stability`` leaves more of their size.

    Args:
        stability: Added to each norm, in the unit of the gradient, greater than 0.

    Source: Bu, Wang, Zha and Karypis, Automatic Clipping (2022), AUTO-S.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        _validate.positive("stability", self.stability)

    @override
    def factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        return bounds / (norms + self.stability)

    @override
    def describe(self, max_norm: float, parameters: Collection[str]) -> str:
        return f"{max_norm:g} (automatic, gradients scaled by {max_norm:g} / (norm + {self.stability:g}))"


@dataclass(frozen=True)
class PerLayerClipping(FlatClipping):
    """A bound for each layer: the factor of layer ``l`` is ``min(1, C_l / norm_l)``, with squares that add up.

    The bounds are ``C_l = max_grad_norm * w_l / sqrt(sum w^2)``, so that a record still adds at most ``max_grad_norm``.
    A layer is a module with trained parameters of its own; its weight and bias share one bound. Equal weights give each
    of L layers ``max_grad_norm / sqrt(L)``.

    Args:
        weights: ``w_l`` by path of the layer, such as ``{"encoder": 2.0}``; a path stands for all layers under it, the
            longest one that fits counts, and 1 where none does.

    Source: McMahan, Ramage, Talwar and Zhang, Learning Differentially Private Recurrent Language Models (2018), §2.2.
    """

    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise InvalidValueError(f"`weights` must map paths of layers to numbers, got {self.weights!r}.")
        for path, weight in self.weights.items():
            _validate.positive(f"weights[{path!r}]", weight)

    @override
    def groups(self, parameters: Collection[str]) -> dict[str, str]:
        return {name: name.rpartition(".")[0] for name in parameters}

    @override
    def bounds(self, max_norm: float, groups: Collection[str]) -> list[float]:
        weights = [self._weight(path) for path in groups]
        total = math.hypot(*weights)
        return [max_norm * weight / total for weight in weights]

    @override
    def check(self, parameters: Collection[str]) -> None:
        layers = dict.fromkeys(self.groups(parameters).values())
        for path in self.weights:
            if not any(_is_under(layer, path) for layer in layers):
                raise InvalidValueError(
                    f"`PerLayerClipping(weights=...)` names `{path}`, where the module has no layer with parameters. It"
                    f" has {', '.join(f'`{layer}`' for layer in layers)}."
                )

    def _weight(self, layer: str) -> float:
        fitting = [path for path in self.weights if _is_under(layer, path)]
        return float(self.weights[max(fitting, key=len)]) if fitting else 1.0

    @override
    def describe(self, max_norm: float, parameters: Collection[str]) -> str:
        bounds = self.bounds(max_norm, dict.fromkeys(self.groups(parameters).values()))
        low, high = min(bounds), max(bounds)
        each = f"{low:.4g} each" if high - low < 1e-9 * high else f"{low:.4g} to {high:.4g} each"
        return f"{max_norm:g} (split over {len(bounds)} layers, {each})"


def _is_under(layer: str, path: str) -> bool:
    return layer == path or layer.startswith(f"{path}.")


@dataclass(frozen=True)
class AdaptiveClipping(FlatClipping):
    """A flat bound that follows a quantile of the gradient norms, starting at ``max_grad_norm``.

    Each update releases, in the same draw of noise as the gradient, how many records were clipped, and moves the bound
    by ``C * exp(-learning_rate * (share not clipped - quantile))``. A record's part in that count takes the share
    ``count_share`` of its sensitivity, squared. The noise multiplier, and with it epsilon, is that of both together:
    gradients get ``1 / sqrt(1 - count_share)`` times the noise that they would get alone.

    Args:
        quantile: The share of records that shall stay unclipped, in (0, 1).
        learning_rate: How fast the bound moves, greater than 0.
        count_share: In (0, 1). The noise of the count has the standard deviation ``noise_multiplier / (2 *
            sqrt(count_share))`` records: with the default and a noise multiplier of 1, 5 records.

    Source: Andrew, Thakkar, McMahan and Ramaswamy, Differentially Private Learning with Adaptive Clipping (2021),
    Algorithm 1 and Theorem 1.
    """

    is_adaptive: ClassVar[bool] = True

    quantile: float = 0.5
    learning_rate: float = 0.2
    count_share: float = 0.01

    def __post_init__(self) -> None:
        for name in ("quantile", "count_share"):
            value = _validate.probability(name, getattr(self, name))
            if value == 1:
                raise InvalidValueError(f"`{name}` must be below 1, got {value!r}.")
        _validate.positive("learning_rate", self.learning_rate)

    @override
    def sensitivity(self, max_norm: float) -> float:
        return max_norm / math.sqrt(1 - self.count_share)

    def _size(self, max_norm: float) -> float:
        """Size of a record's side number: beside ``max_norm``, it makes the sensitivity full."""
        return max_norm * math.sqrt(self.count_share / (1 - self.count_share))

    @override
    def side(self, norms: Tensor, max_norm: float) -> Tensor:
        # PRIVACY: plus or minus one half, and not 0 or 1, which would be twice as sensitive (Andrew et al., Theorem 1).
        return self._size(max_norm) * torch.where(norms <= max_norm, 1.0, -1.0)

    @override
    def next_norm(self, max_norm: float, side: float) -> float:
        unclipped = 0.5 + 0.5 * side / self._size(max_norm)
        step = -self.learning_rate * (unclipped - self.quantile)
        return max_norm * math.exp(max(-_FURTHEST, min(_FURTHEST, step)))

    @override
    def describe(self, max_norm: float, parameters: Collection[str]) -> str:
        return f"{max_norm:g} at present (adaptive, flat, follows the {self.quantile:g} quantile of the norms)"
