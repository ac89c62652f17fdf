"""Mechanisms read back from plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_dp.accounting.mechanisms.approximate import ApproximateDP
from lightning_dp.accounting.mechanisms.base import Composition, Mechanism, SingleMechanism
from lightning_dp.accounting.mechanisms.exponential import ExponentialMechanism
from lightning_dp.accounting.mechanisms.gaussian import Gaussian
from lightning_dp.accounting.mechanisms.laplace import Laplace
from lightning_dp.accounting.mechanisms.poisson_sampled import PoissonSampled
from lightning_dp.accounting.mechanisms.randomized_response import RandomizedResponse
from lightning_dp.accounting.mechanisms.sampled_group import SampledGroup
from lightning_dp.errors import LedgerError

# The kind that `to_dict` writes, and the arguments it writes with it.
_KINDS: dict[str, tuple[Callable[..., SingleMechanism], tuple[str, ...]]] = {
    "approximate_dp": (ApproximateDP, ("stated_epsilon", "stated_delta", "adjacency")),
    "exponential": (ExponentialMechanism, ("pure_epsilon",)),
    "gaussian": (Gaussian, ("noise_multiplier",)),
    "laplace": (Laplace, ("noise_multiplier",)),
    "poisson_sampled": (PoissonSampled, ("mechanism", "sampling_rate")),
    "randomized_response": (RandomizedResponse, ("pure_epsilon", "categories")),
    "sampled_group": (SampledGroup, ("noise_multiplier", "sampling_rate", "size")),
}


def mechanism_from_dict(data: Mapping[str, Any]) -> Mechanism:
    """Builds the mechanism that ``to_dict`` described.

    Args:
        data: Result of :meth:`Mechanism.to_dict`, possibly read back from a file.

    Raises:
        LedgerError: If the structure is not one that ``to_dict`` writes.
        InvalidValueError: If a value lies outside its range.
    """
    if _entry(data, "kind") != "composition":
        return _single_from_dict(data)
    parts = _entry(data, "parts")
    if not isinstance(parts, list | tuple):
        raise LedgerError(f"`parts` of a stored composition must be a list, got {parts!r}.")
    return Composition(tuple((_single_from_dict(_entry(part, "mechanism")), _entry(part, "count")) for part in parts))


def _single_from_dict(data: Any, *, may_be_sampled: bool = True) -> SingleMechanism:
    kind = _entry(data, "kind")
    if not isinstance(kind, str) or kind not in _KINDS or (kind == "poisson_sampled" and not may_be_sampled):
        raise LedgerError(f"A stored mechanism of kind {kind!r} is unknown, or not allowed in this place.")
    build, names = _KINDS[kind]
    arguments = {name: _entry(data, name) for name in names}
    if "mechanism" in arguments:
        arguments["mechanism"] = _single_from_dict(arguments["mechanism"], may_be_sampled=False)
    return build(**arguments)


def _entry(data: Any, key: str) -> Any:
    if not isinstance(data, Mapping) or key not in data:
        raise LedgerError(f"A stored mechanism must be a dict with the key {key!r}, got {data!r}.")
    return data[key]
