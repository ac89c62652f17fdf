"""Gradients that are sums of outer products over positions: ``g_i = sum_t b_it a_it^T``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.gradients.layers.cancelled import SumOfTerms
from lightning_dp.gradients.layers.pressed import press, pressed_shape
from lightning_dp.gradients.layers.use import Rows, Use, hidden, norm_bound, smaller_weighted, squared, wide, zeroed
from lightning_dp.gradients.layers.workspace import Workspace, pieces

CANCELLED = 0.02  # share of the terms of a sum of squares that must be left for it to be exact to 1e-5
_LOST = 1e-3  # over the number of positions: the same for a sum of products, over what it is if all are parallel
_CPU_BATCH = 4  # times the scratch memory of a processor


class Outer(SumOfTerms):
    """The weight of a linear layer.

    Args:
        a: Inputs, ``(records, positions, inputs)``.
        b: Gradients of the outputs, ``(records, positions, outputs)``.
        shape: Shape of the weight, ``(outputs, inputs)`` in any form.
        name: Of the parameter, for its workspace.
        norms: Norms of ``b``, ``(records,)``, if they are known.
    """

    def __init__(self, a: Tensor, b: Tensor, shape: torch.Size, name: str, norms: Tensor | None = None) -> None:
        self.a, self.b, self.name, self._norms = wide(a), wide(b), name, norms
        super().__init__(len(a), shape, self.a)

    @property
    @override
    def sizes(self) -> tuple[int, ...]:
        return (self.a.shape[1], self.a.shape[2], self.b.shape[2])

    @property
    @override
    def methods(self) -> tuple[str, ...]:
        positions, inputs, outputs = self.sizes
        if positions == 1:
            return ("product",)
        if positions * (inputs + outputs) < inputs * outputs:
            return "gram", "rows", "twice"
        return "rows", "twice", "gram"

    @property
    @override
    def all_methods(self) -> tuple[str, ...]:
        return "product", "gram", "rows", "twice"

    @override
    def kept_bytes(self, method: str) -> int:
        return self.records * self._row_bytes if method == "rows" else 0

    @property
    def _row_bytes(self) -> int:
        return self.shape.numel() * self.a.element_size()

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        if method == "product":
            return norm_bound(self.a).mul_(norm_bound(self.b, self._norms)).square_(), self
        if method == "gram":
            squares, terms, underflow = gram_squares(self.a, self.b, workspace)
            doubtful = is_cancelled(squares, terms, self.a.shape[1])
            squares += underflow
            return squares, self.mended(squares, doubtful)
        if method == "twice":
            squares = self._by_pieces(workspace)
            return squares, self.mended(squares, is_lost(squares, self.a, self.b, self.a.shape[1]))
        rows = workspace.take(self.name, (self.records, self.b.shape[2], self.a.shape[2]), self.a)
        torch.bmm(self.b.transpose(1, 2), self.a, out=rows)
        return squared(rows), Rows(rows.view(self.records, *self.shape))

    def _by_pieces(self, workspace: Workspace) -> Tensor:
        """The norms of rows that are not kept."""
        norms = self.a.new_empty(self.records)
        # Products of many records at once gain more on a processor than norms lose outside of its nearest cache.
        share = _CPU_BATCH if self.device.type == "cpu" else 1
        for part in pieces(self.records, self._row_bytes // share, self.device):
            a, b = self.a[part], self.b[part]
            rows = workspace.take("rows", (len(a), b.shape[2], a.shape[2]), a)
            norms[part] = squared(torch.bmm(b.transpose(1, 2), a, out=rows))
        return norms

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        _, inputs, outputs = self.sizes
        a, b = smaller_weighted(self.a, self.b, weights, workspace)
        total.view(outputs, inputs).addmm_(b.reshape(-1, outputs).t(), a.reshape(-1, inputs))

    @override
    def plus(self, others: Sequence[Use]) -> Use:
        uses = [self, *(use for use in others if isinstance(use, Outer))]
        rest = [use for use in others if not isinstance(use, Outer)]
        a, b = torch.cat([use.a for use in uses], 1), torch.cat([use.b for use in uses], 1)
        merged = Outer(a, b, self.shape, self.name) if len(uses) > 1 else self
        return rest[0].plus([*rest[1:], merged]) if rest else merged

    @override
    def rows(self) -> Tensor:
        return torch.bmm(self.b.transpose(1, 2), self.a).view(self.records, *self.shape)

    @override
    def only(self, kept: Tensor) -> Outer:
        return Outer(zeroed(self.a, kept), zeroed(self.b, kept), self.shape, self.name)

    @override
    def pressed(self) -> Use:
        if self.shape != (self.b.shape[2], self.a.shape[2]):
            return super().pressed()
        return Outer(self.a, press(self.b, 2), pressed_shape(self.shape), self.name)

    @override
    def exact_rows(self, records: Tensor) -> Tensor:
        rows = torch.bmm(self.b[records].double().transpose(1, 2), self.a[records].double())
        return rows.view(len(records), *self.shape)


def gram_squares(a: Tensor, b: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """``|g|^2 = sum_ts (a_t . a_s) (b_t . b_s)``, without the gradient itself (Goodfellow, 2015).

    Args:
        a: Inputs, ``(records, positions, inputs)``.
        b: Gradients of the outputs, ``(records, positions, outputs)``.
        workspace: Memory.

    Returns:
        Squared norms, ``(records,)``; the sums of the sizes of their terms, for where nearly nothing is left of those,
        rounding decides, and far too small a norm would leave the record unclipped; and what products that underflow
        may hide of the squared norms.
    """
    size = len(a), a.shape[1], a.shape[1]
    products = torch.bmm(a, a.transpose(1, 2), out=workspace.take("gram a", size, a))
    others = torch.bmm(b, b.transpose(1, 2), out=workspace.take("gram b", size, b))
    # PRIVACY: a product that underflows is zero, and would hide a gradient where the other factor is large.
    underflow = _trace(others) * hidden(a.shape[1:].numel(), a.dtype) ** 2
    underflow += _trace(products) * hidden(b.shape[1:].numel(), b.dtype) ** 2
    products.mul_(others)
    return products.sum((1, 2)), products.abs_().sum((1, 2)), underflow


def _trace(products: Tensor) -> Tensor:
    """The squared norm of each record, from products of its positions with each other."""
    return products.diagonal(dim1=1, dim2=2).sum(1)


def is_cancelled(squares: Tensor, terms: Tensor, positions: int) -> Tensor:
    """Where so little is left of a Gram sum that its rounding is no longer small beside it.

    Rounding errors of many terms partly cancel, so that the more terms there are, the less must be left.

    Args:
        squares: What is left, ``(records,)``.
        terms: Sums of the sizes of the terms, ``(records,)``.
        positions: The terms are all pairs of so many positions.
    """
    return squares < CANCELLED * min(1.0, 4 / math.sqrt(positions)) * terms


def is_lost(squares: Tensor, a: Tensor, b: Tensor, positions: int, repeated: float = 1.0) -> Tensor:
    """The same for a sum of products; where factors have nothing to do with each other, far more is left.

    Args:
        squares: Squared norms of the sums, ``(records,)``.
        a: One factor, ``(records, ...)``.
        b: The other one, ``(records, ...)``.
        positions: How many products are added up.
        repeated: How often a number of ``a`` occurs in them.
    """
    return squares < _LOST / max(1, positions) * repeated * squared(a) * squared(b)
