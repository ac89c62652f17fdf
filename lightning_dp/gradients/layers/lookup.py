"""Gradients that fill few rows of a table: those that a record looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_dp.gradients.layers.outer import Outer
from lightning_dp.gradients.layers.pressed import MOST_ROWS, places_and_signs, pressed_shape
from lightning_dp.gradients.layers.tied import TiedHead
from lightning_dp.gradients.layers.use import Use, squared, wide, zeroed
from lightning_dp.gradients.layers.workspace import Workspace


class Pairs(NamedTuple):
    """Every row of the table that a record looked up, once.

    Attributes:
        owners: The record, ``(pairs,)``, in ascending order.
        tokens: The row, ``(pairs,)``.
        order: Positions of the look-ups, so that equal pairs are next to each other, ``(look-ups,)``.
        starts: Where in ``order`` each pair begins, ``(pairs,)``.
    """

    owners: Tensor
    tokens: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, owners: Tensor, tokens: Tensor, vocabulary: int) -> Pairs:
        """Finds equal pairs by one key that holds record and row."""
        keys, order = torch.sort(owners * vocabulary + tokens, stable=True)
        keys, counts = torch.unique_consecutive(keys, return_counts=True)
        owners = keys.div(vocabulary, rounding_mode="floor")
        return cls(owners, keys - owners * vocabulary, order, counts.cumsum(0) - counts)

    def sums(self, values: Tensor) -> Tensor:
        """Adds up what the look-ups of each pair hold, ``(look-ups, width)`` to ``(pairs, width)``."""
        if not len(self.order):
            return values
        total: Tensor = F.embedding_bag(self.order, values, self.starts, mode="sum")
        return total


class Lookup(Use):
    """The table of an embedding.

    Args:
        tokens: Rows that each record looked up, ``(records, look-ups)``.
        values: Gradients of what was found there, ``(records, look-ups, width)``.
        shape: Shape of the table, ``(vocabulary, width)``.
        padding: Row without a gradient.
    """

    def __init__(self, tokens: Tensor, values: Tensor, shape: torch.Size, padding: int | None) -> None:
        self.tokens, self.values, self.padding = tokens, wide(values), padding
        super().__init__(len(tokens), shape, self.values)

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        return self._collapsed().start("rows", workspace)

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        self._collapsed().add_to(total, weights, workspace)

    @override
    def rows(self) -> Tensor:
        return self._collapsed().rows()

    @override
    def pressed(self) -> Use:
        return self._collapsed().pressed()

    @override
    def plus(self, others: Sequence[Use]) -> Use:
        lookups = [self, *(use for use in others if isinstance(use, Lookup) and use.padding == self.padding)]
        heads = [use for use in others if isinstance(use, Outer)]
        if len(lookups) + len(heads) <= len(others):
            return super().plus(others)
        tokens, values = (torch.cat(parts, 1) for parts in zip(*((u.tokens, u.values) for u in lookups), strict=True))
        lookup = Lookup(tokens, values, self.shape, self.padding)
        head = heads[0].plus(heads[1:]) if heads else None
        return TiedHead(lookup, head) if isinstance(head, Outer) else lookup

    @override
    def only(self, kept: Tensor) -> Lookup:
        return Lookup(self.tokens, zeroed(self.values, kept), self.shape, self.padding)

    def exact_rows(self, records: Tensor) -> Tensor:
        """The gradients of some records in float64, ``(some, vocabulary, width)``."""
        return Lookup(self.tokens[records], self.values[records].double(), self.shape, self.padding).rows()

    def _collapsed(self) -> Collapsed:
        owners = torch.arange(self.records, device=self.device).repeat_interleave(self.tokens.shape[1])
        pairs = Pairs.of(owners, self.tokens.reshape(-1), self.shape[0])
        sums = pairs.sums(self.values.reshape(-1, self.shape[1]))
        if self.padding is not None:
            sums.masked_fill_((pairs.tokens == self.padding).unsqueeze(1), 0)
        return Collapsed(pairs.owners, pairs.tokens, sums, self.records, self.shape)


class Collapsed(Use):
    """Rows of a table, each at most once for each record.

    Args:
        owners: Records, ``(pairs,)``.
        tokens: Rows, ``(pairs,)``.
        values: Their gradients, ``(pairs, width)``.
        records: Number of records.
        shape: Shape of the table, ``(vocabulary, width)``.
    """

    def __init__(self, owners: Tensor, tokens: Tensor, values: Tensor, records: int, shape: torch.Size) -> None:
        self.owners, self.tokens, self.values = owners, tokens, values
        super().__init__(records, shape, values)

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        # PRIVACY: two look-ups of one row add up before the norm is taken, for together they may be twice as long.
        return self.values.new_zeros(self.records).index_add_(0, self.owners, squared(self.values)), self

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        weighted = self.values * weights.to(self.dtype)[self.owners].unsqueeze(1)
        total.index_add_(0, self.tokens, weighted.to(total.dtype))

    @override
    def rows(self) -> Tensor:
        rows = self.values.new_zeros(self.records, *self.shape)
        rows[self.owners, self.tokens] = self.values
        return rows

    @override
    def pressed(self) -> Use:
        if self.shape == pressed_shape(self.shape):
            return self
        places, signs = places_and_signs(self.shape[0], self.device)
        values = self.values * signs[self.tokens].to(self.dtype).unsqueeze(1)
        pairs = Pairs.of(self.owners, places[self.tokens], MOST_ROWS)
        owners, tokens, values = pairs.owners, pairs.tokens, pairs.sums(values)
        return Collapsed(owners, tokens, values, self.records, pressed_shape(self.shape))

    @override
    def only(self, kept: Tensor) -> Use:
        values = zeroed(self.values, kept[self.owners])
        return Collapsed(self.owners, self.tokens, values, self.records, self.shape)
