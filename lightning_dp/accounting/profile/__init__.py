"""The privacy profile: delta as a function of epsilon, for any composition, with bounds of every error."""

from lightning_dp.accounting.profile.bounds import clear_caches
from lightning_dp.accounting.profile.composed import Composed
from lightning_dp.accounting.profile.interval import Interval
from lightning_dp.accounting.profile.losses import AtomicLoss, Floats, GaussianLoss, Loss, SampledGaussianLoss
from lightning_dp.accounting.profile.readings import PrivacyProfile
from lightning_dp.accounting.profile.running import RunningEpsilon

__all__ = [
    "AtomicLoss",
    "Composed",
    "Floats",
    "GaussianLoss",
    "Interval",
    "Loss",
    "PrivacyProfile",
    "RunningEpsilon",
    "SampledGaussianLoss",
    "clear_caches",
]
