"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from typing_extensions import override

from lightning_dp.gradients.layers.cancelled import SumOfTerms
from lightning_dp.gradients.layers.outer import gram_squares, is_cancelled, is_lost
from lightning_dp.gradients.layers.registry import LayerForward, register_layer, without_batch
from lightning_dp.gradients.layers.use import Permuted, Rows, Use, smaller_weighted, squared, wide, zeroed
from lightning_dp.gradients.layers.workspace import Workspace, pieces, scratch_bytes

_NATIVE: dict[int, Callable[..., Any]] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
_SHORT_RUN = 16


class Geometry(NamedTuple):
    """How a convolution goes over its input, one number per dimension, which is padded with zeros on both sides."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(forward: LayerForward) -> dict[str, Use]:
    """Weight ``(outputs, inputs / groups, *kernel)`` and bias ``(outputs,)`` of inputs ``(records, inputs, *extent)``.

    Raises:
        UnsupportedModelError: The input has no dimension for records.
    """
    layer, b = forward.layer, wide(forward.gradient)
    if b.dim() != layer.weight.dim():
        raise without_batch(forward)
    uses: dict[str, Use] = {}
    if "weight" in forward.wanted:
        a, padding = _padded(wide(forward.inputs[0]), layer)
        geometry = Geometry(layer.stride, padding, layer.dilation, layer.groups)
        uses["weight"] = Convolved(a, b, geometry, layer.weight.shape, f"{forward.path}.weight")
    if "bias" in forward.wanted:
        uses["bias"] = Rows(b.flatten(2).sum(2))
    return uses


class Convolved(SumOfTerms):
    """The weight of a convolution.

    Args:
        a: Inputs, ``(records, inputs, *extent)``.
        b: Gradients of the outputs, ``(records, outputs, *positions)``.
        geometry: How the inputs were gone over.
        shape: Shape of the weight, ``(outputs, inputs / groups, *kernel)``.
        name: Of the parameter, for its workspace.
    """

    def __init__(self, a: Tensor, b: Tensor, geometry: Geometry, shape: torch.Size, name: str) -> None:
        super().__init__(len(a), shape, a)
        self.a, self.b, self.geometry, self.name = a, b, geometry, name

    @property
    @override
    def sizes(self) -> tuple[int, ...]:
        return math.prod(self.b.shape[2:]), self.shape[1:].numel(), self.shape[0] // self.geometry.groups

    @property
    @override
    def methods(self) -> tuple[str, ...]:
        positions, inputs, outputs = self.sizes
        written = "rows", "twice"
        if positions * (inputs + outputs) > 2 * inputs * outputs:
            return *written, "native", "native twice"
        # Small maps: the libraries' weight gradients are slow, unless several records can share a call.
        return ("gram", *written, "native", "native twice") if self._shared_call > 1 else ("gram", *written)

    @property
    @override
    def all_methods(self) -> tuple[str, ...]:
        return "gram", "rows", "twice", "native", "native twice"

    @override
    def kept_bytes(self, method: str) -> int:
        return self.records * self._row_bytes if method in ("rows", "native") else 0

    @override
    def start(self, method: str, workspace: Workspace) -> tuple[Tensor, Use]:
        if method == "gram":
            squares, doubtful = self._by_gram(workspace)
            return squares, self.mended(squares, doubtful)
        kept = not method.endswith("twice")
        found = self._by_library(workspace, kept) if method.startswith("native") else self._by_product(workspace, kept)
        if kept:
            return found
        squares, (positions, inputs, _) = found[0], self.sizes
        repeated = positions * inputs * self.geometry.groups / max(1, self.a.shape[1:].numel())
        return squares, self.mended(squares, is_lost(squares, self.a, self.b, positions, repeated))

    @override
    def add_to(self, total: Tensor, weights: Tensor, workspace: Workspace) -> None:
        if self.records:
            a, b = smaller_weighted(self.a, self.b, weights, workspace)
            total.add_(_weight_gradient(a, b, self.shape, self.geometry))

    @override
    def rows(self) -> Tensor:
        return self._by_product(Workspace(), kept=True)[1].rows()

    @override
    def exact_rows(self, records: Tensor) -> Tensor:
        a, b = self.a[records].double(), self.b[records].double()
        return Convolved(a, b, self.geometry, self.shape, self.name).rows()

    @override
    def only(self, kept: Tensor) -> Convolved:
        return Convolved(zeroed(self.a, kept), zeroed(self.b, kept), self.geometry, self.shape, self.name)

    # -- rows by a product with the unfolded input -------------------------------------------------------------------

    def _by_product(self, workspace: Workspace, kept: bool) -> tuple[Tensor, Use]:
        groups, (_, inputs, outputs) = self.geometry.groups, self.sizes
        kernel, channels, dims = self.shape[2:], self.shape[1], len(self.shape) - 2
        # In the order in which the libraries' products are fastest.
        if self._by_channels:
            size, order = (outputs, *kernel, channels), (0, dims + 1, *range(1, dims + 1))
        else:
            size, order = (groups, channels, *kernel, outputs), (0, dims + 2, *range(1, dims + 2))
        norms = self.a.new_empty(self.records)
        stored = workspace.take(self.name, (self.records, *size), self.a) if kept else None
        for part, a, b in self._unfolded(workspace, self._row_bytes):
            rows = workspace.take("rows", (len(a) // groups, *size), a) if stored is None else stored[part]
            if self._by_channels:
                torch.bmm(b, a.transpose(1, 2), out=rows.view(len(a), outputs, inputs))
            else:
                torch.bmm(a, b.transpose(1, 2), out=rows.view(len(a), inputs, outputs))
            torch.linalg.vector_norm(rows.flatten(1), dim=1, out=norms[part])  # here, while they are in the cache
        return norms.square_(), self if stored is None else Permuted(stored, order, self.shape)

    @property
    def _by_channels(self) -> bool:
        """Whether to unfold with channels last: positions make runs in memory that are too short to copy fast."""
        run = self.b.shape[-1] if self.geometry.stride[-1] == 1 else 1
        return self.geometry.groups == 1 and run <= _SHORT_RUN <= self.shape[1] * self.shape[-1]

    def _unfolded(self, workspace: Workspace, written: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Goes over the records, so many at a time that they fit into the scratch memory.

        Args:
            workspace: Memory.
            written: Bytes that are written for each record beside its unfolded input.

        Yields:
            Which records, their inputs ``(records * groups, inputs * kernel, positions)``, and output gradients
            ``(records * groups, outputs, positions)``.
        """
        groups, (positions, inputs, outputs) = self.geometry.groups, self.sizes
        a = self.a.movedim(1, -1) if self._by_channels else self.a
        b = self.b.reshape(self.records, groups * outputs, positions)
        unfolded = positions * inputs * groups * a.element_size()
        for part in pieces(self.records, unfolded + written, self.device):
            windows = self._written_out(self._with_margins(a[part], workspace, part.start == 0), workspace)
            count = len(windows) * groups
            if self._by_channels:
                windows = windows.view(count, positions, inputs).transpose(1, 2)
            yield part, windows.view(count, inputs, positions), b[part].reshape(count, outputs, positions)

    def _with_margins(self, a: Tensor, workspace: Workspace, is_first: bool) -> Tensor:
        """Contiguous inputs with zeros around them, which the first part writes for all that are no larger."""
        first, padding = 1 if self._by_channels else 2, self.geometry.padding
        if not any(padding):
            return a if a.is_contiguous() else workspace.take("margins", a.shape, a).copy_(a)
        size = list(a.shape)
        for dim, margin in enumerate(padding, first):
            size[dim] += 2 * margin
        wide = inner = workspace.take("margins", size, a)
        if is_first:
            wide.zero_()
        for dim, margin in enumerate(padding, first):
            inner = inner.narrow(dim, margin, a.shape[dim])
        inner.copy_(a)
        return wide

    def _written_out(self, a: Tensor, workspace: Workspace) -> Tensor:
        """Contiguous inputs, each once for each place in the kernel and each position that meet there."""
        kernel, step = self.shape[2:], self.geometry.stride[-1]
        windows = self._windows(a, kernel, self.geometry)
        if windows.is_contiguous():
            return windows
        out = workspace.take("unfolded", windows.shape, a)
        if self._by_channels or step == 1 or self.geometry.dilation[-1] > 1:
            return out.copy_(windows)
        # Numbers that are not next to each other are slow to copy, so those a step apart come next to each other first.
        geometry, dim = Geometry((*self.geometry.stride[:-1], 1), *self.geometry[1:]), len(kernel) + 1
        for first in range(min(step, kernel[-1])):
            columns = a[..., first::step]
            columns = workspace.take("columns", columns.shape, a).copy_(columns)
            taps = *kernel[:-1], len(range(first, kernel[-1], step))
            places = (slice(None),) * dim + (slice(first, None, step),)
            out[places].copy_(self._windows(columns, taps, geometry))
        return out

    def _windows(self, a: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
        """A view of contiguous inputs that shows them as :meth:`_written_out` writes them."""
        steps = a.stride()[1:-1] if self._by_channels else a.stride()[2:]
        taps = [step * dilation for step, dilation in zip(steps, geometry.dilation, strict=True)]
        moves = [step * stride for step, stride in zip(steps, geometry.stride, strict=True)]
        positions = self.b.shape[2:]
        if self._by_channels:
            size, strides = (len(a), *positions, *kernel, a.shape[-1]), (a.stride(0), *moves, *taps, a.stride(-1))
        else:
            size, strides = (*a.shape[:2], *kernel, *positions), (*a.stride()[:2], *taps, *moves)
        return a.as_strided(size, strides, a.storage_offset())

    def _by_gram(self, workspace: Workspace) -> tuple[Tensor, Tensor]:
        found = self.a.new_empty(3, self.records)
        for part, a, b in self._unfolded(workspace, 0):
            sums = torch.stack(gram_squares(a.transpose(1, 2), b.transpose(1, 2), workspace))
            found[:, part] = sums.view(3, -1, self.geometry.groups).sum(2)
        squares, terms, underflow = found
        return squares + underflow, is_cancelled(squares, terms, self.sizes[0])

    # -- rows by the weight gradient of the convolution library ------------------------------------------------------

    @property
    def _row_bytes(self) -> int:
        return self.shape.numel() * self.a.element_size()

    @property
    def _shared_call(self) -> int:
        """Records that share a call, as groups of one convolution: many for small weights, and one for each thread."""
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        return max(threads, scratch_bytes(self.device) // (4 * threads * self._row_bytes))

    def _by_library(self, workspace: Workspace, kept: bool) -> tuple[Tensor, Use]:
        norms = self.a.new_empty(self.records)
        rows = workspace.take(self.name, (self.records, *self.shape), self.a) if kept else None
        for first in range(0, self.records, self._shared_call):
            part = slice(first, min(self.records, first + self._shared_call))
            some = self._native(self.a[part], self.b[part])
            norms[part] = squared(some)
            if rows is not None:
                rows[part] = some
        return norms, self if rows is None else Rows(rows)

    def _native(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows of some records, whose channels are laid side by side (Rochette, Manoel and Tramel, 2019)."""
        stride, padding, dilation, groups = self.geometry
        geometry = Geometry(stride, padding, dilation, len(a) * groups)
        shape = torch.Size((len(a) * self.shape[0], *self.shape[1:]))
        side_by_side = a.reshape(1, -1, *a.shape[2:]), b.reshape(1, -1, *b.shape[2:])
        return _weight_gradient(*side_by_side, shape, geometry).reshape(len(a), *self.shape)


def _weight_gradient(a: Tensor, b: Tensor, shape: torch.Size, geometry: Geometry) -> Tensor:
    """The weight's gradient, summed over records."""
    stride, padding, dilation, groups = geometry
    gradient: Tensor = _NATIVE[a.dim() - 2](a, shape, b, stride, padding, dilation, groups)
    return gradient


def _padded(a: Tensor, layer: Any) -> tuple[Tensor, tuple[int, ...]]:
    """The input, with margins that are uneven or hold other things than zeros, and the margins that are left to add."""
    if layer.padding == "same":
        spare = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        margins = [(s // 2, s - s // 2) for s in spare]
    else:
        margins = [(0, 0)] * (a.dim() - 2) if layer.padding == "valid" else [(p, p) for p in layer.padding]
    if layer.padding_mode == "zeros" and all(before == after for before, after in margins):
        return a, tuple(before for before, _ in margins)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(a, [p for margin in reversed(margins) for p in margin], mode), (0,) * len(margins)
