"""Policy and reporting: budgets, monitors, statements and comparisons."""

from lightning_dp.callbacks.baseline import NonPrivateBaseline
from lightning_dp.callbacks.budget import PrivacyBudget
from lightning_dp.callbacks.clip_norm import ClipNormCalibrator
from lightning_dp.callbacks.monitor import PrivacyMonitor

__all__ = ["ClipNormCalibrator", "NonPrivateBaseline", "PrivacyBudget", "PrivacyMonitor"]
