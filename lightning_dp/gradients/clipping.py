"""Flat clipping: one bound on the gradient of one record over all parameters together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def clipped_sum(rows: Sequence[Tensor], max_norm: float) -> tuple[list[Tensor], Tensor]:
    """Clips each record's gradient to ``max_norm`` and sums over records.

    A record whose gradient is not finite is dropped: it adds nothing. Whether it is dropped depends on that record
    alone, so the sum still changes by at most ``max_norm`` when a record comes or goes.

    Args:
        rows: Per-record gradients, one tensor ``(records, *parameter_shape)`` per parameter, float32 or float64.
        max_norm: Largest L2 norm of one record over all parameters together.

    Returns:
        The sums, ``parameter_shape`` each, and the norms before clipping, ``(records,)``.

    Source: Abadi et al., Deep Learning with Differential Privacy (2016), Algorithm 1.
    """
    norms = record_norms(rows)
    finite = torch.isfinite(norms)
    # PRIVACY: min(1, C / norm) bounds every record by C, and zero times infinity is not zero, so the rows of a
    # dropped record are zeroed themselves.
    factors = torch.where(finite, (max_norm / norms).clamp(max=1.0), torch.zeros_like(norms))
    if not bool(finite.all()):
        rows = [torch.where(_like(finite, row), row, torch.zeros_like(row)) for row in rows]
    return [torch.tensordot(factors.to(row.dtype), row, dims=1) for row in rows], norms


def _like(mask: Tensor, row: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (row.dim() - 1))
