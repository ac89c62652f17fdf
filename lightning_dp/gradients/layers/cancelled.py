"""Records whose terms nearly cancel, so that what is left is lost in the rounding of the terms.

The norm says how much of a record's gradient may stay in the sum, so both must be about the same number. Where they are
computed in different ways, they are only as far as rounding is small beside the gradient itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.gradients.layers.use import Use, squared
from lightning_dp.gradients.layers.workspace import Workspace, pieces


class SumOfTerms(Use):
    """A use whose norms come from something else than the rows that are summed."""

    @abstractmethod
    @override
    def only(self, kept: Tensor) -> SumOfTerms: ...

    @abstractmethod
    def exact_rows(self, records: Tensor) -> Tensor:
        """The gradients of some records in float64.

        Args:
            records: Their numbers, ``(some,)``.

        Returns:
            ``(some, *shape)``.
        """

    def mended(self, squares: Tensor, doubtful: Tensor, started: Use | None = None) -> Use:
        """Computes the norms of some records again, and gives what the sum is computed from.

        Args:
            squares: Squared norms, ``(records,)``, changed in place.
            doubtful: True where rounding may be large beside the norm, ``(records,)``.
            started: What the sum over the other records is computed from; this use if ``None``.
        """
        started = self if started is None else started
        if not bool(doubtful.any()):
            return started
        records = doubtful.nonzero().flatten()
        for some in _some(self, records):
            squares[some] = squared(self.exact_rows(some)).to(squares.dtype)
        return _Mended(started, self, records)


class _Mended(Use):
    """A use with records that are added up by their rows in float64.

    Args:
        use: All records.
        exact: The same, for those records.
        records: Their numbers.
    """

    def __init__(self, use: Use, exact: SumOfTerms, records: Tensor) -> None:
        super().__init__(use.records, use.shape, torch.empty(0, dtype=use.dtype, device=use.device))
        self._use, self._exact, self._records = use, exact, records

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        return self._exact.start(method, workspace)

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        self._use.add_to(total, weights.index_fill(0, self._records, 0), workspace)
        for some in _some(self._exact, self._records):
            share = weights[some].double() @ self._exact.exact_rows(some).flatten(1)
            total.add_(share.view(total.shape).to(total.dtype))

    @override
    def rows(self) -> Tensor:
        return self._exact.rows()

    @override
    def pressed(self) -> Use:
        return self._exact.pressed()

    @override
    def only(self, kept: Tensor) -> Use:
        return _Mended(self._use.only(kept), self._exact.only(kept), self._records)


def _some(use: Use, records: Tensor) -> Iterator[Tensor]:
    """So many records at a time that their rows fit into the scratch memory."""
    for part in pieces(len(records), 8 * use.shape.numel(), use.device):
        yield records[part]
