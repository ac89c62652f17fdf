"""What was released about the data, as values: a Gaussian mechanism, its Poisson-sampled form, their composition.

Every number a mechanism reports is for add/remove adjacency: one record present or absent, whichever is worse.

Example:
    >>> step = PoissonSampled(Gaussian(1.0), sampling_rate=0.01)
    >>> round((1000 * step).epsilon(delta=1e-5), 6)
    1.828237
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting import profile
from lightning_dp.errors import InvalidValueError, LedgerError

_MOST = 2**53  # counts above are no longer exact as floats


class Mechanism(ABC):
    """A release with a privacy profile; ``a + b`` and ``n * a`` compose (adaptively, in any order)."""

    __array_ufunc__ = None  # lets `numpy_integer * mechanism` reach __rmul__

    @property
    @abstractmethod
    def phases(self) -> tuple[tuple[Mechanism, int], ...]:
        """Distinct single mechanisms with how often each was applied."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain strings, numbers, lists and dicts that :func:`mechanism_from_dict` turns back into an equal value."""

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon of the guarantee at ``delta``, never below the true one.

        Args:
            delta: In (0, 1).

        Returns:
            Epsilon for add/remove adjacency; ``inf`` if something was released without noise.
        """
        return profile.epsilon(_profile_phases(self), _validate.delta(delta))

    def delta(self, epsilon: float) -> float:
        """Smallest delta of the guarantee at ``epsilon``, never below the true one.

        Args:
            epsilon: Finite and at least 0.

        Returns:
            Delta for add/remove adjacency, in [0, 1].
        """
        return profile.delta(_profile_phases(self), _validate.non_negative("epsilon", epsilon))

    def __add__(self, other: Mechanism) -> Composition:
        if not isinstance(other, Mechanism):
            return NotImplemented
        return Composition((*self.phases, *other.phases))

    def __mul__(self, count: int) -> Composition:
        times = _validate.integer("count", count, 0)
        return Composition(tuple((mechanism, times * n) for mechanism, n in self.phases))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Adds Gaussian noise to a value of bounded L2 sensitivity.

    Args:
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity; 0 means no noise, hence no privacy.
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        value = _validate.non_negative("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", value)

    @property
    def phases(self) -> tuple[tuple[Mechanism, int], ...]:
        """Itself, once."""
        return ((self, 1),)

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {"kind": "gaussian", "noise_multiplier": self.noise_multiplier}


@dataclass(frozen=True)
class PoissonSampled(Mechanism):
    """Applies a mechanism to a random subset that each record joins independently.

    Args:
        mechanism: The Gaussian mechanism that sees the subset.
        sampling_rate: Probability of each record to be in the subset, in (0, 1]; 1 is the plain mechanism.
    """

    mechanism: Gaussian
    sampling_rate: float

    def __post_init__(self) -> None:
        if not isinstance(self.mechanism, Gaussian):
            raise InvalidValueError(
                f"`mechanism` must be a Gaussian, got {self.mechanism!r}: only its sampled form has a profile here."
                " Sample the single step and compose afterwards, for example 100 * PoissonSampled(Gaussian(1.0), 0.01)."
            )
        object.__setattr__(self, "sampling_rate", _validate.probability("sampling_rate", self.sampling_rate))

    @property
    def phases(self) -> tuple[tuple[Mechanism, int], ...]:
        """Itself, once."""
        return ((self, 1),)

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {
            "kind": "poisson_sampled",
            "mechanism": self.mechanism.to_dict(),
            "sampling_rate": self.sampling_rate,
        }


@dataclass(frozen=True, eq=False)
class Composition(Mechanism):
    """Several mechanisms on the same records; equal ones are counted, and order does not matter for equality.

    Args:
        parts: Pairs of a mechanism and a count of at least 0; compositions among them are taken apart.
    """

    parts: Iterable[tuple[Mechanism, int]] = ()

    def __post_init__(self) -> None:
        counts: dict[Mechanism, int] = {}
        for mechanism, count in self.parts:
            if not isinstance(mechanism, Mechanism):
                raise InvalidValueError(f"`parts` must hold pairs of a mechanism and a count, got {mechanism!r}.")
            times = _validate.integer("count", count, 0)
            for single, n in mechanism.phases:
                counts[single] = counts.get(single, 0) + times * n
        for single, total in counts.items():
            if total > _MOST:
                raise InvalidValueError(f"`count` of {single!r} must be at most 2**53, got {total}.")
        object.__setattr__(self, "parts", tuple((single, n) for single, n in counts.items() if n))

    @property
    def phases(self) -> tuple[tuple[Mechanism, int], ...]:
        """Distinct mechanisms in order of first appearance, with their counts."""
        return tuple(self.parts)

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        parts = [{"mechanism": mechanism.to_dict(), "count": count} for mechanism, count in self.phases]
        return {"kind": "composition", "parts": parts}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composition):
            return NotImplemented
        return frozenset(self.phases) == frozenset(other.phases)

    def __hash__(self) -> int:
        return hash(frozenset(self.phases))


def mechanism_from_dict(data: Mapping[str, Any]) -> Mechanism:
    """Builds the mechanism that ``to_dict`` described.

    Args:
        data: Result of :meth:`Mechanism.to_dict`, possibly read back from a file.

    Raises:
        LedgerError: If the structure is not one that ``to_dict`` writes.
        InvalidValueError: If a value lies outside its range.
    """
    if _kind(data) != "composition":
        return _single_from_dict(data)
    parts = _entry(data, "parts")
    if not isinstance(parts, list | tuple):
        raise LedgerError(f"`parts` of a stored composition must be a list, got {parts!r}.")
    return Composition(tuple((_single_from_dict(_entry(part, "mechanism")), _entry(part, "count")) for part in parts))


def _single_from_dict(data: Any) -> Gaussian | PoissonSampled:
    if _kind(data) == "poisson_sampled":
        return PoissonSampled(_gaussian_from_dict(_entry(data, "mechanism")), _entry(data, "sampling_rate"))
    return _gaussian_from_dict(data)


def _gaussian_from_dict(data: Any) -> Gaussian:
    if _kind(data) != "gaussian":
        raise LedgerError(f"A stored mechanism of kind {_kind(data)!r} is unknown, or not allowed in this place.")
    return Gaussian(_entry(data, "noise_multiplier"))


def _kind(data: Any) -> Any:
    return _entry(data, "kind")


def _entry(data: Any, key: str) -> Any:
    if not isinstance(data, Mapping) or key not in data:
        raise LedgerError(f"A stored mechanism must be a dict with the key {key!r}, got {data!r}.")
    return data[key]


def _profile_phases(mechanism: Mechanism) -> tuple[profile.Phase, ...]:
    """The phases as plain numbers, for the cache of :mod:`lightning_dp.accounting.profile`."""
    phases = []
    for single, count in mechanism.phases:
        if isinstance(single, PoissonSampled):
            phases.append((single.sampling_rate, single.mechanism.noise_multiplier, count))
        elif isinstance(single, Gaussian):
            phases.append((1.0, single.noise_multiplier, count))
        else:
            raise InvalidValueError(f"{single!r} has no privacy profile here.")
    return tuple(phases)
