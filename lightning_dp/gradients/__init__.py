"""What one record may add to an update: per-record gradients, clipping, noise, and the probe of the model."""

from lightning_dp.gradients.bookkeeping import BookKeepingEngine
from lightning_dp.gradients.choice import GradientMemory
from lightning_dp.gradients.clipping import Clipping, ClippingRule, clipped_sum, record_norms
from lightning_dp.gradients.engine import GradientEngine, trainable
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.gradients.guard import StepGuard, check_layers
from lightning_dp.gradients.hooks import HookEngine
from lightning_dp.gradients.layers import LayerForward, Rows, Use, register_layer
from lightning_dp.gradients.noise import standard_normal
from lightning_dp.gradients.noisy_sum import ClippedSum
from lightning_dp.gradients.norms import gradient_norms
from lightning_dp.gradients.probe import IndependenceProbe
from lightning_dp.gradients.rules import AdaptiveClipping, AutomaticClipping, FlatClipping, PerLayerClipping

__all__ = [
    "AdaptiveClipping",
    "AutomaticClipping",
    "BookKeepingEngine",
    "ClippedSum",
    "Clipping",
    "ClippingRule",
    "FlatClipping",
    "FlatGradient",
    "GradientEngine",
    "GradientMemory",
    "HookEngine",
    "IndependenceProbe",
    "LayerForward",
    "PerLayerClipping",
    "Rows",
    "StepGuard",
    "Use",
    "check_layers",
    "clipped_sum",
    "gradient_norms",
    "record_norms",
    "register_layer",
    "standard_normal",
    "trainable",
]
