"""From the chunks of one logical batch to the one gradient that is released."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import Tensor

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.clipping import Clipping
from lightning_dp.gradients.engine import GradientEngine
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.sampling.entropy import KeyStream


class ClippedSum:
    """Adds up the clipped gradients of the records of one logical batch, chunk by chunk, and releases the sum.

    Args:
        engine: Where the clipped sum of each chunk comes from.
        clipping: How much of each record's gradient stays in the first update.

    Attributes:
        clipping: The same for the update at hand; changed by rules that move the clip norm.
    """

    def __init__(self, engine: GradientEngine, clipping: Clipping) -> None:
        self.engine, self.clipping = engine, clipping
        self._raw: FlatGradient | None = None
        self._released: FlatGradient | None = None
        self._warned = False

    def add_chunk(self, num_records: int) -> None:
        """Adds the clipped gradients of the last backward pass; 0 records add nothing.

        Raises:
            UnsupportedModelError: A parameter's gradient is not made of one row for each record.
        """
        if num_records == 0:
            self.engine.forget()
            self.engine.drop_raw()
            return
        total = self._sum()
        norms = self.engine.add_clipped(total, num_records, self.clipping)
        if self._is_adaptive:
            total.side.add_(self.clipping.side_sum(norms))

    def release(
        self,
        *,
        noise_multiplier: float,
        stream: KeyStream | None,
        index: int,
        reduce: Callable[[Tensor], Tensor],
        divide_by: float,
    ) -> None:
        """Adds noise, sums over processes, divides, and makes the result the gradient of the parameters.

        Args:
            noise_multiplier: Standard deviation of the noise over the sensitivity of the clipping rule.
            stream: Where noise comes from; None on all processes but one.
            index: The stretch of the stream.
            reduce: Sums a vector over all processes.
            divide_by: The expected number of records.
        """
        raw = self._sum()
        self._warn_unused(raw.used)
        if self._released is None or not self._released.fits(self.engine.parameters):
            self._released = FlatGradient(self.engine.parameters, has_side=self._is_adaptive)
        released = self._released
        try:
            # PRIVACY: gradients of the last update may be views of this memory, which gets sum and noise in one go.
            released.take(
                raw,
                factor=1 / divide_by,
                scale=noise_multiplier * self.clipping.sensitivity / divide_by,
                stream=stream,
                index=index,
            )
            total = reduce(released.vector)
            if total is not released.vector:
                released.vector.copy_(total)
        except BaseException:
            # PRIVACY: on a process without noise of its own it holds a bare sum until it is reduced.
            released.vector.zero_()
            raise
        released.hand_out(self.engine.parameters.values())
        if self._is_adaptive:
            self.clipping = self.clipping.after(float(released.side))
        if self.engine.is_frugal:
            self._raw = None

    @property
    def _is_adaptive(self) -> bool:
        return self.clipping.rule.is_adaptive

    def reset(self) -> None:
        """Forgets what has been added."""
        self._raw = self._released = None

    def _sum(self) -> FlatGradient:
        if self._raw is None or not self._raw.fits(self.engine.parameters):
            if self._raw is not None and self._raw.used:
                raise UnsupportedModelError(
                    "Parameters were frozen, unfrozen, moved or cast between two batches of one update, and the sum of"
                    " its first batches is for the others. Do that in `on_train_epoch_start`, or when"
                    " `trainer.global_step` has changed."
                )
            self._raw = FlatGradient(self.engine.parameters, has_side=self._is_adaptive)
        return self._raw

    def _warn_unused(self, used: set[str]) -> None:
        names = [name for name in self.engine.parameters if name not in used]
        if names and used and not self._warned:
            self._warned = True
            warnings.warn(
                f"No record of this update has a gradient for {', '.join(f'`{n}`' for n in names)}: it receives noise"
                " only, since whether a parameter is used may depend on the data. Freeze what the loss does not use.",
                UserWarning,
                stacklevel=2,
            )
