"""Losses whose parts belong to one record each."""

from __future__ import annotations

from torch import Tensor

from lightning_dp.errors import InvalidValueError


def per_record_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean over records of each record's own mean, for losses of many parts a record, such as tokens.

    The usual mean over all tokens of a padded batch ties records together: how much one text counts depends on how long
    the others are, so clipping a gradient does not bound what one text does. Here every text counts alike.

    Args:
        values: A loss for each part of each record, ``(records, ...)``.
        mask: Which parts count, of the shape of ``values``: booleans, or weights of at least 0. All if ``None``. A
            record of which none count adds 0.

    Returns:
        A number, ``()``.

    Raises:
        InvalidValueError: The shapes differ, or there is no dimension for records.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> from lightning_dp import per_record_mean
        >>> logits, labels = torch.zeros(2, 3, 10), torch.tensor([[1, 2, 3], [4, -100, -100]])
        >>> losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        >>> round(float(per_record_mean(losses, labels != -100)), 4)
        2.3026
    """
    if values.dim() == 0:
        raise InvalidValueError(
            "`values` is one number for the whole batch. Give a loss for each part of each record, for example with"
            ' `reduction="none"`.'
        )
    if mask is None:
        return values.flatten(1).mean(1).mean() if values.dim() > 1 else values.mean()
    if mask.shape != values.shape:
        raise InvalidValueError(
            f"`mask` must have the shape of `values`, {tuple(values.shape)}, got {tuple(mask.shape)}."
        )
    weights = mask.to(values.dtype).reshape(len(mask), -1)
    kept = values.reshape(len(values), -1).masked_fill(weights == 0, 0)  # zero times infinity is not zero
    totals = (kept * weights).sum(1)
    counts = weights.sum(1)
    return (totals / counts.where(counts > 0, 1)).mean()
