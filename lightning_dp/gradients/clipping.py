"""How much of a record's gradient stays, as a function of its norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ClippingRule(Protocol):
    """A clipping rule: factors for the gradients of records."""

    def factors(self, norms: Tensor) -> Tensor:
        """The factor for each record, such that factor times norm is at most :attr:`sensitivity`.

        Args:
            norms: L2 norm of each record's gradient over all parameters, ``(records,)``, possibly not finite.

        Returns:
            Non-negative factors, ``(records,)``; 0 where the norm is not finite.
        """

    @property
    def sensitivity(self) -> float:
        """Largest L2 norm that one record may add to the sum."""


@dataclass(frozen=True)
class FlatClipping:
    """One bound over all parameters together: ``min(1, max_norm / norm)``.

    Args:
        max_norm: Largest L2 norm of one record.

    Source: Abadi et al., Deep Learning with Differential Privacy (2016), Algorithm 1.
    """

    max_norm: float

    def factors(self, norms: Tensor) -> Tensor:
        """``min(1, max_norm / norm)``, ``(records,)``; 0 where the norm is not finite."""
        # PRIVACY: a norm that is not finite says nothing about the rest of the record.
        return torch.where(torch.isfinite(norms), (self.max_norm / norms).clamp(max=1.0), torch.zeros_like(norms))

    @property
    def sensitivity(self) -> float:
        """``max_norm``."""
        return self.max_norm


def record_norms(rows: Sequence[Tensor]) -> Tensor:
    """L2 norm of each record's gradient over all parameters together.

    Args:
        rows: Per-record gradients, one tensor ``(records, *parameter_shape)`` per parameter.

    Returns:
        The norms, ``(records,)``, in float32 or float64.
    """
    per_parameter = [torch.linalg.vector_norm(row.flatten(1), dim=1) for row in rows]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(per_parameter), dim=0)
    return norms


def clipped_sum(rows: Sequence[Tensor], rule: ClippingRule) -> tuple[list[Tensor], Tensor]:
    """Clips each record's gradient and sums over records; the plain way, which the engines are compared with.

    A record whose gradient is not finite is dropped: it adds nothing. Whether it is dropped depends on that record
    alone, so the sum still changes by at most the rule's sensitivity when a record comes or goes.

    Args:
        rows: Per-record gradients, one tensor ``(records, *parameter_shape)`` per parameter, float32 or float64.
        rule: How much of each stays.

    Returns:
        The sums, ``parameter_shape`` each, and the norms before clipping, ``(records,)``.
    """
    norms = record_norms(rows)
    finite = torch.isfinite(norms)
    # PRIVACY: zero times infinity is not zero, so the rows of a dropped record are zeroed themselves.
    if not bool(finite.all()):
        rows = [torch.where(finite.view(-1, *[1] * (row.dim() - 1)), row, torch.zeros_like(row)) for row in rows]
    factors = rule.factors(norms)
    return [torch.tensordot(factors.to(row.dtype), row, dims=1) for row in rows], norms
