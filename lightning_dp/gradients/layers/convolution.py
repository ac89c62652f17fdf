"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from typing_extensions import override

from lightning_dp.gradients.layers.cancelled import SumOfTerms
from lightning_dp.gradients.layers.outer import gram_squares, is_cancelled, is_lost, underflow
from lightning_dp.gradients.layers.registry import LayerForward, register_layer, without_batch
from lightning_dp.gradients.layers.use import Permuted, Rows, Use, smaller_weighted, squared, wide, zeroed
from lightning_dp.gradients.layers.workspace import Workspace, pieces, scratch_bytes

_NATIVE: dict[int, Callable[..., Any]] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
_SHORT_RUN = 8


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

    def _parts(self, written: int) -> Iterator[slice]:
        """Records whose unfolded inputs fit into the scratch memory, with so many bytes that are written for each."""
        positions, inputs, _ = self.sizes
        unfolded = positions * inputs * self.geometry.groups * self.a.element_size()
        return pieces(self.records, unfolded + written, self.device)

    def _by_product(self, workspace: Workspace, kept: bool) -> tuple[Tensor, Use]:
        groups, (_, inputs, outputs) = self.geometry.groups, self.sizes
        kernel, channels = self.shape[2:], self.shape[1]
        # Inputs before outputs: the libraries' products are faster that way.
        size = (groups, *kernel, channels, outputs) if self._by_channels else (groups, channels, *kernel, outputs)
        norms = self.a.new_empty(self.records)
        stored = workspace.take(self.name, (self.records, *size), self.a) if kept else None
        for part in self._parts(self._row_bytes):
            a, b = self._unfolded(part, workspace)
            some = workspace.take("rows", (len(a) // groups, *size), a) if stored is None else stored[part]
            torch.bmm(a, b.transpose(1, 2), out=some.view(len(a), inputs, outputs))
            norms[part] = squared(some)  # here, while they are in the cache
        dims = len(kernel)
        order = (
            (0, dims + 2, dims + 1, *range(1, dims + 1)) if self._by_channels else (0, dims + 2, *range(1, dims + 2))
        )
        return norms, self if stored is None else Permuted(stored, order, self.shape)

    @property
    def _by_channels(self) -> bool:
        """Whether to unfold with channels last: positions make runs in memory that are too short to copy fast."""
        run = self.b.shape[-1] if self.geometry.stride[-1] == 1 else 1
        return self.geometry.groups == 1 and run <= _SHORT_RUN <= self.shape[1] * self.shape[-1]

    def _unfolded(self, part: slice, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """Inputs ``(records * groups, inputs * kernel, positions)`` and output gradients, of some records."""
        b = self.b[part].reshape(-1, self.sizes[2], self.sizes[0])
        a, dims = self.a[part], len(self.geometry.stride)
        if self._by_channels:
            a = self._with_margins(a.movedim(1, -1), range(1, dims + 1), workspace)
            windows = self._windows(a, range(1, dims + 1))
            windows = windows.permute(0, *range(dims + 1, 2 * dims + 1), *range(1, dims + 1), 2 * dims + 1)
            windows = workspace.take("unfolded", windows.shape, a).copy_(windows)
            return windows.view(len(b), self.sizes[0], self.sizes[1]).transpose(1, 2), b
        windows = self._windows(self._with_margins(a, range(2, dims + 2), workspace), range(2, dims + 2))
        if not windows.is_contiguous():
            windows = workspace.take("unfolded", windows.shape, a).copy_(windows)
        return windows.view(len(b), self.sizes[1], self.sizes[0]), b

    def _with_margins(self, a: Tensor, extent: range, workspace: Workspace) -> Tensor:
        """A contiguous tensor with zeros around the dimensions of ``extent``."""
        if not any(self.geometry.padding):
            return a.contiguous()
        margins = dict(zip(extent, self.geometry.padding, strict=True))
        size = [n + 2 * margins.get(dim, 0) for dim, n in enumerate(a.shape)]
        wide = workspace.take("margins", size, a).zero_()
        inner = wide
        for dim, margin in margins.items():
            inner = inner.narrow(dim, margin, a.shape[dim])
        inner.copy_(a)
        return wide

    def _windows(self, a: Tensor, extent: range) -> Tensor:
        """A view that has, in the place of the dimensions of ``extent``, those of the kernel and of positions."""
        before, after = range(extent.start), range(extent.stop, a.dim())
        steps = [a.stride(dim) for dim in extent]
        taps = [step * dilation for step, dilation in zip(steps, self.geometry.dilation, strict=True)]
        moves = [step * stride for step, stride in zip(steps, self.geometry.stride, strict=True)]
        return a.as_strided(
            [*(a.shape[d] for d in before), *self.shape[2:], *self.b.shape[2:], *(a.shape[d] for d in after)],
            [*(a.stride(d) for d in before), *taps, *moves, *(a.stride(d) for d in after)],
            a.storage_offset(),
        )

    def _by_gram(self, workspace: Workspace) -> tuple[Tensor, Tensor]:
        groups, (positions, inputs, _) = self.geometry.groups, self.sizes
        norms, sizes = self.a.new_empty(self.records), self.a.new_empty(self.records)
        for part in self._parts(0):
            a, b = self._unfolded(part, workspace)
            squares, terms = gram_squares(a.transpose(1, 2), b.transpose(1, 2), workspace)
            norms[part], sizes[part] = (x.view(-1, groups).sum(1) if groups > 1 else x for x in (squares, terms))
        doubtful = is_cancelled(norms, sizes, positions)
        return norms.add_(underflow(self.a, self.b, positions * inputs * groups, self.b.shape[1:].numel())), doubtful

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
