"""How much of a record's gradient stays, and the plain way to a clipped sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_dp.gradients.layers.use import norms_of


class ClippingRule(ABC):
    """A clipping rule: factors for the gradients of records, from their norms alone.

    It has no state: the clip norm is handed in, and a rule that moves it says where to. A rule of one's own needs
    :meth:`factors`.

    Attributes:
        is_adaptive: Whether the clip norm moves, by :meth:`next_norm`.
    """

    is_adaptive: ClassVar[bool] = False

    @abstractmethod
    def factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        """The factor for each record and group of parameters.

        Args:
            norms: L2 norm of each record's gradient over the parameters of each group, ``(groups, records)``.
            bounds: What :meth:`bounds` gives, ``(groups, 1)``.

        Returns:
            Non-negative factors, ``(groups, records)``. Factors times norms, and :meth:`side` with them, must have an
            L2 norm of at most :meth:`sensitivity` for each record. What is returned for a record whose norms are not
            all finite has no effect: it is dropped.
        """

    def groups(self, parameters: Collection[str]) -> dict[str, str]:
        """The group of each trained parameter, by name; by default one for all."""
        return dict.fromkeys(parameters, "")

    def bounds(self, max_norm: float, groups: Collection[str]) -> list[float]:
        """The clip norm of each group, such that they add up to ``max_norm`` as squares do."""
        return [max_norm]

    def check(self, parameters: Collection[str]) -> None:  # noqa: B027  # most rules fit every module
        """Checks that the rule fits a module.

        Args:
            parameters: Names of all its parameters.

        Raises:
            InvalidValueError: It does not.
        """

    def sensitivity(self, max_norm: float) -> float:
        """Largest L2 norm of all that one record may add: gradient and side number. What the noise is relative to."""
        return max_norm

    def side(self, norms: Tensor, max_norm: float) -> Tensor:
        """A number that each record adds beside its gradient where the rule is adaptive, released in the same draw.

        Args:
            norms: L2 norm of each record's gradient over all parameters, ``(records,)``, finite.
            max_norm: The clip norm.

        Returns:
            ``(records,)``.
        """
        return torch.zeros_like(norms)

    def next_norm(self, max_norm: float, side: float) -> float:
        """The clip norm of the next update.

        Args:
            max_norm: That of this one.
            side: The released sum of :meth:`side`, over the expected number of records.
        """
        return max_norm

    def describe(self, max_norm: float, parameters: Collection[str]) -> str:
        """The bound of one record in words, for people."""
        return f"{max_norm:g} ({type(self).__name__})"


class Decision(NamedTuple):
    """What becomes of the records of a batch.

    Attributes:
        norms: L2 norm of each record's gradient over all parameters, ``(records,)``.
        finite: Which records stay; the others are dropped, ``(records,)``.
        factors: What each record's gradient is multiplied by, ``(records,)``, for each parameter that takes part.
    """

    norms: Tensor
    finite: Tensor
    factors: dict[str, Tensor]


@dataclass(frozen=True)
class Clipping:
    """A rule and the clip norm that holds now.

    Args:
        rule: How much of each record's gradient stays.
        max_norm: The clip norm.
    """

    rule: ClippingRule
    max_norm: float

    @property
    def sensitivity(self) -> float:
        """Largest L2 norm of all that one record may add to the sum."""
        return self.rule.sensitivity(self.max_norm)

    def decide(self, squares: Mapping[str, Tensor], parameters: Collection[str], scale: float = 1.0) -> Decision:
        """Looks at the norms of a batch.

        Args:
            squares: Squared L2 norm of each record's gradient, ``(records,)``, for each parameter that takes part.
            parameters: Names of all that are trained.
            scale: What the norms are multiplied by.
        """
        groups = self.rule.groups(parameters)
        # PRIVACY: of all trained parameters, so that a group's bound does not depend on who takes part.
        places = {group: place for place, group in enumerate(dict.fromkeys(groups.values()))}
        members: list[list[Tensor]] = [[] for _ in places]
        for name, square in squares.items():
            members[places[groups[name]]].append(square)
        none = torch.zeros_like(next(iter(squares.values())))
        by_group = torch.stack([torch.stack(member).sum(0) if member else none for member in members])
        norms = by_group.sum(0).sqrt_().mul_(scale)
        finite = torch.isfinite(norms)
        bounds = by_group.new_tensor(self.rule.bounds(self.max_norm, places)).unsqueeze(1)
        # PRIVACY: a norm that is not finite says nothing about the rest of the record.
        factors = torch.where(finite, self.rule.factors(by_group.sqrt_().mul_(scale), bounds), 0)
        return Decision(norms, finite, {name: factors[places[groups[name]]] for name in squares})

    def side_sum(self, norms: Tensor) -> Tensor:
        """The sum of the rule's side numbers over the records that stay, given all norms."""
        finite = torch.isfinite(norms)
        # PRIVACY: a record that is dropped adds nothing at all.
        return torch.where(finite, self.rule.side(torch.where(finite, norms, 0), self.max_norm), 0).sum()

    def after(self, side: float) -> Clipping:
        """The clipping of the next update, given the released side number over the expected number of records."""
        return Clipping(self.rule, self.rule.next_norm(self.max_norm, side))


def record_norms(rows: Collection[Tensor]) -> Tensor:
    """L2 norm of each record's gradient over all parameters together.

    Args:
        rows: Per-record gradients, one tensor ``(records, *parameter_shape)`` per parameter.

    Returns:
        The norms, ``(records,)``, in float32 or float64.
    """
    norms: Tensor = torch.linalg.vector_norm(torch.stack([norms_of(row) for row in rows]), dim=0)
    return norms


def clipped_sum(
    rows: Mapping[str, Tensor], clipping: Clipping, parameters: Collection[str] = ()
) -> tuple[dict[str, Tensor], Tensor]:
    """Clips each record's gradient and sums over records; the plain way, which the engines are compared with.

    A record whose gradient is not finite is dropped: it adds nothing. Whether it is dropped depends on that record
    alone, so the sum still changes by at most the rule's sensitivity when a record comes or goes.

    Args:
        rows: Per-record gradients, ``(records, *parameter_shape)`` in float32 or float64, by name of the parameter.
        clipping: How much of each stays.
        parameters: Names of all parameters that are trained; those of ``rows`` if empty.

    Returns:
        The sums, ``parameter_shape`` each, by name, and the norms before clipping, ``(records,)``.
    """
    squares = {name: record_norms([row]).square_() for name, row in rows.items()}
    norms, finite, factors = clipping.decide(squares, parameters or rows)
    # PRIVACY: zero times infinity is not zero, so the rows of a dropped record are zeroed themselves.
    if not bool(finite.all()):
        kept = {name: torch.where(finite.view(-1, *[1] * (row.dim() - 1)), row, 0) for name, row in rows.items()}
    else:
        kept = dict(rows)
    return {name: torch.tensordot(factors[name].to(row.dtype), row, dims=1) for name, row in kept.items()}, norms
