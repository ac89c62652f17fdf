"""What one record may add to an update: per-record gradients, clipping, noise, and the probe of the model."""

from lightning_dp.gradients.clipping import clipped_sum, record_norms
from lightning_dp.gradients.guard import StepGuard, check_layers
from lightning_dp.gradients.hooks import RecordGradients
from lightning_dp.gradients.noise import standard_normal
from lightning_dp.gradients.noisy_sum import ClippedSum, add_noise, set_gradients
from lightning_dp.gradients.probe import IndependenceProbe

__all__ = [
    "ClippedSum",
    "IndependenceProbe",
    "RecordGradients",
    "StepGuard",
    "add_noise",
    "check_layers",
    "clipped_sum",
    "record_norms",
    "set_gradients",
    "standard_normal",
]
