"""One use of a parameter in one step: what every record adds to its gradient, kept in the cheapest form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_dp.gradients.layers.pressed import press, pressed_shape
from lightning_dp.gradients.layers.workspace import Workspace


class Use(ABC):
    """What each record of a batch adds to the gradient of one parameter.

    Args:
        records: Number of records in the batch.
        shape: Shape of the parameter.
        like: Gives the type, float32 or float64, and the device of norms and sums.
    """

    def __init__(self, records: int, shape: torch.Size, like: Tensor) -> None:
        self.records, self.shape = records, shape
        self.dtype, self.device = like.dtype, like.device

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways to the norms that exist for these sizes, the one of fewest operations first."""
        return ("rows",)

    @property
    def all_methods(self) -> tuple[str, ...]:
        """Those that exist for some sizes."""
        return self.methods

    def kept_bytes(self, method: str) -> int:
        """Memory that a method holds from the norms to the sum, beside inputs and output gradients.

        Those take the place of what the backward pass frees meanwhile.
        """
        return 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes on which the speed of the methods depends, without the number of records."""
        return ()

    @abstractmethod
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        """Computes the norms.

        Args:
            method: One of :attr:`methods`.
            workspace: Memory that is used again in the next step.

        Returns:
            The squared L2 norm of each record's gradient, ``(records,)``, in float32 or float64, and what the sum is
            computed from afterwards.
        """

    @abstractmethod
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        """Adds the weighted sum over records.

        Args:
            total: ``shape``, changed in place.
            weights: ``(records,)``, of the type of ``total``.
            workspace: Memory that is used again in the next step.
        """

    @abstractmethod
    def rows(self) -> Tensor:
        """The gradient of each record, ``(records, *shape)``."""

    def pressed(self) -> Use:
        """What each record adds to the pressed parameter, see :func:`press`; made for few records."""
        return Rows(press(self.rows(), 1)) if self.shape != pressed_shape(self.shape) else self

    def plus(self, others: Sequence[Use]) -> Use:
        """This use and other ones of the same parameter in the same step as one."""
        if not others:
            return self
        # PRIVACY: the norm of a sum may be as large as the sum of the norms, so rows are added before anyone takes one.
        total = self.rows()
        for use in others:
            total = total + use.rows()
        return Rows(total)

    @abstractmethod
    def only(self, kept: Tensor) -> Use:
        """The same with the gradients of all other records set to zero, whatever they hold.

        Args:
            kept: True for the records that stay, ``(records,)``.
        """


class Rows(Use):
    """The gradient of each record, written out.

    Args:
        rows: ``(records, *shape)``.
        norms: Their norms, ``(records,)``, if they are known.
    """

    def __init__(self, rows: Tensor, norms: Tensor | None = None) -> None:
        self._rows, self._norms = wide(rows), norms
        super().__init__(len(rows), rows.shape[1:], self._rows)

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        return squared(self._rows) if self._norms is None else self._norms.square(), self

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        total.view(-1).addmv_(self._rows.reshape(self.records, self.shape.numel()).t(), weights)

    @override
    def rows(self) -> Tensor:
        return self._rows

    @override
    def only(self, kept: Tensor) -> Use:
        return Rows(zeroed(self._rows, kept))


class Permuted(Rows):
    """The gradient of each record, written out with its dimensions in an order that was faster to compute.

    Args:
        stored: ``(records, *stored)``.
        order: The dimensions of one record in the parameter's order; neighbours may be one dimension there.
        shape: Shape of the parameter.
    """

    def __init__(self, stored: Tensor, order: Sequence[int], shape: torch.Size) -> None:
        super().__init__(stored)
        self.order, self.stored, self.shape = tuple(order), stored.shape[1:], shape

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        part = total.new_zeros(self.stored)
        super().add_to(part, weights, workspace)
        part = part.permute(self.order)
        total.view(part.shape).add_(part)

    @override
    def rows(self) -> Tensor:
        return self._rows.permute(0, *(1 + dim for dim in self.order)).reshape(self.records, *self.shape)

    @override
    def only(self, kept: Tensor) -> Use:
        return Permuted(zeroed(self._rows, kept), self.order, self.shape)


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least, whatever the forward pass ran in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def norms_of(rows: Tensor) -> Tensor:
    """Norm of each row, ``(records,)``."""
    norms: Tensor = torch.linalg.vector_norm(rows.reshape(len(rows), rows.shape[1:].numel()), dim=1)
    return norms


def squared(rows: Tensor) -> Tensor:
    """Squared norm of each row, ``(records,)``."""
    return norms_of(rows).square_()


def norm_bound(rows: Tensor, norms: Tensor | None = None) -> Tensor:
    """Norm of each row, ``(records,)``, and what underflow may hide of it: the norm of factors that are multiplied.

    Args:
        rows: ``(records, ...)``.
        norms: Their norms, if they are known.
    """
    # PRIVACY: squares of numbers below 1e-19 are zero in float32, but times a large factor they make a gradient.
    return (norms_of(rows) if norms is None else norms) + hidden(rows.shape[1:].numel(), rows.dtype)


def hidden(count: int, dtype: torch.dtype) -> float:
    """How large the norm of so many numbers may be if all of their squares underflow."""
    return math.sqrt(count * torch.finfo(dtype).tiny)


def weighted(tensor: Tensor, weights: Tensor, workspace: Workspace) -> Tensor:
    """Each record times its weight."""
    out = workspace.take("weighted", tensor.shape, tensor)
    return torch.mul(tensor, weights.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1)), out=out)


def smaller_weighted(a: Tensor, b: Tensor, weights: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Two factors of each record's gradient, the smaller one times the record's weight."""
    if a.numel() < b.numel():
        return weighted(a, weights, workspace), b
    return a, weighted(b, weights, workspace)


def zeroed(tensor: Tensor, kept: Tensor) -> Tensor:
    """The same with all but the ``kept`` records replaced by zeros; zero times infinity would not be zero."""
    return torch.where(kept.view(-1, *[1] * (tensor.dim() - 1)), tensor, torch.zeros((), dtype=tensor.dtype))
