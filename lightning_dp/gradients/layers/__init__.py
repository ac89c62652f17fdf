"""What each kind of layer adds to the gradients of its parameters, record by record."""

from lightning_dp.gradients.layers import convolution, embedding, linear, normalization
from lightning_dp.gradients.layers.other import by_sampler, by_vectorized_backward, has_sampler
from lightning_dp.gradients.layers.registry import (
    Casting,
    LayerForward,
    LayerGradients,
    has_no_forward,
    is_part,
    known_gradients,
    own_parameters,
    register_layer,
)
from lightning_dp.gradients.layers.use import Rows, Use
from lightning_dp.gradients.layers.workspace import Workspace

__all__ = [
    "Casting",
    "LayerForward",
    "LayerGradients",
    "Rows",
    "Use",
    "Workspace",
    "by_sampler",
    "by_vectorized_backward",
    "convolution",
    "embedding",
    "has_no_forward",
    "has_sampler",
    "is_part",
    "known_gradients",
    "linear",
    "normalization",
    "own_parameters",
    "register_layer",
]
