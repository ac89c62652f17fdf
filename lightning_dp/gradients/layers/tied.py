"""Tables that are used as an embedding and as the weight of a linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.gradients.layers.cancelled import SumOfTerms
from lightning_dp.gradients.layers.outer import CANCELLED, Outer, is_lost
from lightning_dp.gradients.layers.use import Use, squared
from lightning_dp.gradients.layers.workspace import Workspace, pieces

if TYPE_CHECKING:
    from lightning_dp.gradients.layers.lookup import Lookup


class Both(Use):
    """Two uses of one parameter, which are kept apart."""

    def __init__(self, first: Use, second: Use) -> None:
        super().__init__(first.records, first.shape, torch.empty(0, dtype=first.dtype, device=first.device))
        self.first, self.second = first, second

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        return squared(self.rows()), self

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        self.first.add_to(total, weights, workspace)
        self.second.add_to(total, weights, workspace)

    @override
    def rows(self) -> Tensor:
        return self.first.rows() + self.second.rows()

    @override
    def pressed(self) -> Use:
        return Both(self.first.pressed(), self.second.pressed())

    @override
    def only(self, kept: Tensor) -> Use:
        return Both(self.first.only(kept), self.second.only(kept))


class TiedHead(Both, SumOfTerms):
    """A table that serves as the weight of a linear layer, too.

    Args:
        table: The table as an embedding.
        head: The table as a weight, with inputs ``(records, positions, width)``.
    """

    first: Lookup
    second: Outer

    def __init__(self, table: Lookup, head: Outer) -> None:
        super().__init__(table, head)

    @property
    @override
    def methods(self) -> tuple[str, ...]:
        return self.second.methods

    @property
    @override
    def all_methods(self) -> tuple[str, ...]:
        return self.second.all_methods

    @property
    @override
    def sizes(self) -> tuple[int, ...]:
        return self.second.sizes

    @override
    def kept_bytes(self, method: str) -> int:
        return self.second.kept_bytes(method)

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        """``|e + l|^2 = |e|^2 + |l|^2 + 2 <e, l>``."""
        found, table = self.first.start("rows", workspace)
        written, head = self.second.start(method, workspace)
        apart = found + written
        norms = apart + 2 * self._inner_products()
        # PRIVACY: where the two nearly cancel, rounding may leave far too small a norm, and the record would not be
        # clipped. NaN compares false, and stays.
        doubtful = (norms < CANCELLED * apart) | is_lost(norms, self.second.a, self.second.b, self.second.a.shape[1])
        return norms, self.mended(norms, doubtful, Both(table, head))

    @override
    def exact_rows(self, records: Tensor) -> Tensor:
        return self.first.exact_rows(records).add_(self.second.exact_rows(records))

    @override
    def only(self, kept: Tensor) -> TiedHead:
        return TiedHead(self.first.only(kept), self.second.only(kept))

    def _inner_products(self) -> Tensor:
        """``<e, l> = sum_te (a_t . v_e) b_t[token_e]``: the weight's gradient is read at the tokens only."""
        lookup, head = self.first, self.second
        products, (positions, lookups) = (
            lookup.values.new_empty(self.records),
            (head.a.shape[1], lookup.tokens.shape[1]),
        )
        for part in pieces(self.records, 2 * positions * lookups * lookup.values.element_size(), self.device):
            tokens, values = lookup.tokens[part], lookup.values[part]
            if lookup.padding is not None:
                values = values.masked_fill((tokens == lookup.padding).unsqueeze(2), 0)
            read = head.b[part].gather(2, tokens.unsqueeze(1).expand(-1, positions, -1))
            products[part] = torch.bmm(head.a[part], values.transpose(1, 2)).mul_(read).sum((1, 2))
        return products
