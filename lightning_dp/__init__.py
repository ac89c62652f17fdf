"""Differentially private training of unedited PyTorch Lightning modules.

Importing registers the strategy ``"private"`` with Lightning and the accountant ``"contour"`` with Opacus, and does
nothing else.
"""

from lightning_dp import errors
from lightning_dp._version import __version__
from lightning_dp.accounting import (
    ApproximateDP,
    Composition,
    ExponentialMechanism,
    Gaussian,
    Guarantee,
    Laplace,
    Ledger,
    LedgerEntry,
    Mechanism,
    PoissonSampled,
    PrivacyProfile,
    PrivacySettings,
    RandomizedResponse,
    RenyiFilter,
    RenyiOdometer,
    advanced_composition,
    basic_composition,
    calculate_privacy,
    calibrate_noise_multiplier,
    central_limit_epsilon_not_a_bound,
    group_privacy,
    updates_left,
)
from lightning_dp.callbacks import ClipNormCalibrator, NonPrivateBaseline, PrivacyBudget, PrivacyMonitor
from lightning_dp.gradients import (
    AdaptiveClipping,
    AutomaticClipping,
    ClippingRule,
    FlatClipping,
    LayerForward,
    PerLayerClipping,
    Rows,
    register_layer,
)
from lightning_dp.integrations import ContourAccountant
from lightning_dp.losses import per_record_mean
from lightning_dp.releases import (
    exponential_mechanism,
    gaussian_mechanism,
    gaussian_noise_multiplier,
    laplace_mechanism,
    randomized_response,
)
from lightning_dp.replacements import replace_unsupported
from lightning_dp.sampling import PublicDataLoader
from lightning_dp.strategies import PrivateDDPStrategy, PrivateStrategy

__all__ = [
    "AdaptiveClipping",
    "ApproximateDP",
    "AutomaticClipping",
    "ClipNormCalibrator",
    "ClippingRule",
    "Composition",
    "ContourAccountant",
    "ExponentialMechanism",
    "FlatClipping",
    "Gaussian",
    "Guarantee",
    "Laplace",
    "LayerForward",
    "Ledger",
    "LedgerEntry",
    "Mechanism",
    "NonPrivateBaseline",
    "PerLayerClipping",
    "PoissonSampled",
    "PrivacyBudget",
    "PrivacyMonitor",
    "PrivacyProfile",
    "PrivacySettings",
    "PrivateDDPStrategy",
    "PrivateStrategy",
    "PublicDataLoader",
    "RandomizedResponse",
    "RenyiFilter",
    "RenyiOdometer",
    "Rows",
    "__version__",
    "advanced_composition",
    "basic_composition",
    "calculate_privacy",
    "calibrate_noise_multiplier",
    "central_limit_epsilon_not_a_bound",
    "errors",
    "exponential_mechanism",
    "gaussian_mechanism",
    "gaussian_noise_multiplier",
    "group_privacy",
    "laplace_mechanism",
    "per_record_mean",
    "randomized_response",
    "register_layer",
    "replace_unsupported",
    "updates_left",
]
