"""What releases cost: mechanisms, their composition and exact privacy profile, the calculator, and the ledger."""

from lightning_dp.accounting.calculator import PrivacySettings, calculate_privacy
from lightning_dp.accounting.calibrate import calibrate_noise_multiplier
from lightning_dp.accounting.composition_theorems import (
    advanced_composition,
    basic_composition,
    central_limit_epsilon_not_a_bound,
    group_privacy,
)
from lightning_dp.accounting.filter import RenyiFilter
from lightning_dp.accounting.guarantee import Guarantee
from lightning_dp.accounting.ledger import Ledger, LedgerEntry
from lightning_dp.accounting.mechanisms import (
    ApproximateDP,
    Composition,
    ExponentialMechanism,
    Gaussian,
    Laplace,
    Mechanism,
    PoissonSampled,
    RandomizedResponse,
    mechanism_from_dict,
)
from lightning_dp.accounting.odometer import RenyiOdometer
from lightning_dp.accounting.profile import Interval, PrivacyProfile
from lightning_dp.accounting.remaining import updates_left

__all__ = [
    "ApproximateDP",
    "Composition",
    "ExponentialMechanism",
    "Gaussian",
    "Guarantee",
    "Interval",
    "Laplace",
    "Ledger",
    "LedgerEntry",
    "Mechanism",
    "PoissonSampled",
    "PrivacyProfile",
    "PrivacySettings",
    "RandomizedResponse",
    "RenyiFilter",
    "RenyiOdometer",
    "advanced_composition",
    "basic_composition",
    "calculate_privacy",
    "calibrate_noise_multiplier",
    "central_limit_epsilon_not_a_bound",
    "group_privacy",
    "mechanism_from_dict",
    "updates_left",
]
