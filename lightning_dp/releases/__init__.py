"""Small releases: numbers, choices and answers, each with its own secret noise and its entry in a ledger."""

from lightning_dp.releases.calibration import gaussian_noise_multiplier
from lightning_dp.releases.choices import exponential_mechanism, randomized_response
from lightning_dp.releases.noisy_numbers import gaussian_mechanism, laplace_mechanism

__all__ = [
    "exponential_mechanism",
    "gaussian_mechanism",
    "gaussian_noise_multiplier",
    "laplace_mechanism",
    "randomized_response",
]
