"""What releases cost: mechanisms, their composition and exact privacy profile, calibration, and the ledger."""

from lightning_dp.accounting.calibrate import calibrate_noise_multiplier
from lightning_dp.accounting.guarantee import Guarantee
from lightning_dp.accounting.ledger import Ledger, LedgerEntry
from lightning_dp.accounting.mechanisms import (
    Composition,
    Gaussian,
    Mechanism,
    PoissonSampled,
    mechanism_from_dict,
)
from lightning_dp.accounting.remaining import updates_left

__all__ = [
    "Composition",
    "Gaussian",
    "Guarantee",
    "Ledger",
    "LedgerEntry",
    "Mechanism",
    "PoissonSampled",
    "calibrate_noise_multiplier",
    "mechanism_from_dict",
    "updates_left",
]
