"""What was released about the data, as values that compose with ``+`` and ``n *``.

Example:
    >>> step = PoissonSampled(Gaussian(1.0), sampling_rate=0.01)
    >>> round((1000 * step).epsilon(delta=1e-5), 6)
    1.828237
"""

from lightning_dp.accounting.mechanisms.approximate import ApproximateDP
from lightning_dp.accounting.mechanisms.base import Composition, Mechanism, SingleMechanism
from lightning_dp.accounting.mechanisms.exponential import ExponentialMechanism
from lightning_dp.accounting.mechanisms.gaussian import Gaussian
from lightning_dp.accounting.mechanisms.laplace import Laplace
from lightning_dp.accounting.mechanisms.poisson_sampled import PoissonSampled
from lightning_dp.accounting.mechanisms.randomized_response import RandomizedResponse
from lightning_dp.accounting.mechanisms.sampled_group import SampledGroup
from lightning_dp.accounting.mechanisms.stored import mechanism_from_dict

__all__ = [
    "ApproximateDP",
    "Composition",
    "ExponentialMechanism",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "PoissonSampled",
    "RandomizedResponse",
    "SampledGroup",
    "SingleMechanism",
    "mechanism_from_dict",
]
