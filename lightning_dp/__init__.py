"""Differentially private training of unedited PyTorch Lightning modules.

Importing registers the strategy ``"private"`` with Lightning and does nothing else.
"""

from lightning_dp import errors
from lightning_dp._version import __version__
from lightning_dp.accounting import (
    Composition,
    Gaussian,
    Guarantee,
    Ledger,
    LedgerEntry,
    Mechanism,
    PoissonSampled,
    calibrate_noise_multiplier,
    updates_left,
)
from lightning_dp.callbacks import NonPrivateBaseline, PrivacyBudget, PrivacyMonitor
from lightning_dp.strategies import PrivateStrategy

__all__ = [
    "Composition",
    "Gaussian",
    "Guarantee",
    "Ledger",
    "LedgerEntry",
    "Mechanism",
    "NonPrivateBaseline",
    "PoissonSampled",
    "PrivacyBudget",
    "PrivacyMonitor",
    "PrivateStrategy",
    "__version__",
    "calibrate_noise_multiplier",
    "errors",
    "updates_left",
]
