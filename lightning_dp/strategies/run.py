"""One call of ``fit``: the state of the mechanism from set-up to teardown, without Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp.accounting import Gaussian, Ledger, PoissonSampled
from lightning_dp.errors import BudgetExceededError, PrivacyViolationError
from lightning_dp.gradients import ClippedSum, Clipping, GradientEngine, StepGuard, trainable
from lightning_dp.sampling import ChunkInfo, KeyStream, PoissonSampler, PrivateDataLoader
from lightning_dp.strategies.sampling_plan import SamplingPlan

_T = TypeVar("_T")
_PROBE_STRETCH, _CLIP_NORM_STRETCH = 2**64 - 1, 2**64 - 2  # of the sampling stream; no update has them


class PrivateRun:
    """Draws batches, adds up clipped gradients and releases noisy ones, and checks that this is what happens.

    The life of one update: :meth:`begin_chunk` and :meth:`end_chunk` around the forward and backward pass of each of
    its physical batches, then :meth:`release`.

    Args:
        module: The module to train, on its device.
        make_engine: Makes the gradient engine of a module.
        clipping: How much of each record's gradient stays in the first update.
        key: The secret of this run, the same on all processes.
        ledger: Where releases are written down.
        release_id: Of what this run releases, the same on all processes.
        watch_parameters: Whether ``training_step`` must leave the parameters alone.
        watch_buffers: Whether it must leave the buffers alone.

    Attributes:
        guard: The checks around each forward pass.
        updates_run: Updates that this run has released.
        updates_allowed: Most updates that it may release; ``None`` if nothing limits them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        make_engine: Callable[[nn.Module], GradientEngine],
        clipping: Clipping,
        key: bytes,
        ledger: Ledger,
        release_id: str,
        watch_parameters: bool = True,
        watch_buffers: bool = True,
    ) -> None:
        self.ledger = ledger
        self.make_engine = make_engine
        self.gradients = make_engine(module)
        self.guard = StepGuard(self.gradients, watch_parameters=watch_parameters, watch_buffers=watch_buffers)
        self.release_id = release_id
        self.updates_run = 0
        self.updates_allowed: int | None = None
        self._plan: SamplingPlan | None = None
        self._sampler: PoissonSampler | None = None
        self._loader: PrivateDataLoader | None = None
        self._mechanism: PoissonSampled | None = None
        self._sampling, self._noise = KeyStream(key, "sampling"), KeyStream(key, "noise")
        self._sum = ClippedSum(self.gradients, clipping)
        self._update, self._chunks_done, self._open = -1, 0, False

    @property
    def clipping(self) -> Clipping:
        """How much of each record's gradient stays in the update at hand."""
        return self._sum.clipping

    @property
    def bound(self) -> str:
        """The bound of one record in words."""
        return self.clipping.rule.describe(self.clipping.max_norm, trainable(self.gradients.module))

    @property
    def plan(self) -> SamplingPlan:
        """The constants of the run, known once the training loader is built."""
        return _known(self._plan)

    @property
    def loader(self) -> PrivateDataLoader:
        """The loader that training draws from, known once it is built."""
        return _known(self._loader)

    @property
    def mechanism(self) -> PoissonSampled:
        """What one update executes, known once the noise is fixed."""
        return _known(self._mechanism)

    @property
    def has_data(self) -> bool:
        """Whether the training loader is built."""
        return self._plan is not None

    @property
    def is_started(self) -> bool:
        """Whether the noise is fixed."""
        return self._mechanism is not None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity of the clipping rule."""
        mechanism = self.mechanism.mechanism
        assert isinstance(mechanism, Gaussian)
        return mechanism.noise_multiplier

    def make_loader(self, loader: DataLoader[Any], plan: SamplingPlan, rank: int) -> PrivateDataLoader:
        """Replaces the user's loader by a Poisson one.

        Raises:
            PrivacyViolationError: The data set changed its size since the run started.
        """
        if self.is_started and plan != self.plan:
            raise PrivacyViolationError(
                f"The reloaded training data gives other constants than the run started with ({plan} instead of"
                f" {self.plan}); the noise was chosen for those. Keep the size of the data set for the whole run."
            )
        sampler = PoissonSampler(
            num_records=plan.num_records,
            sampling_rate=plan.sampling_rate,
            updates_per_epoch=plan.updates_per_epoch,
            num_chunks=plan.num_chunks,
            stream=self._sampling,
            rank=rank,
            world_size=plan.world_size,
            # PRIVACY: a reloaded loader goes on counting, so that no selection and no noise is used twice.
            passes=0 if self._sampler is None else self._sampler.passes,
        )
        self._plan, self._sampler, self._loader = plan, sampler, PrivateDataLoader(loader, sampler)
        return self._loader

    def start(self, noise_multiplier: float) -> None:
        """Fixes the noise of every update."""
        self._mechanism = PoissonSampled(Gaussian(noise_multiplier), self.plan.sampling_rate)

    def begin_chunk(self) -> ChunkInfo:
        """Opens the physical batch that the loader handed out last.

        Raises:
            PrivacyViolationError: It is not the one that must come next.
        """
        info = self.loader.info
        if info is None or self._open:
            raise PrivacyViolationError("`training_step` ran twice on one batch, or on none from the private loader.")
        expected_chunk = self._chunks_done % self.plan.num_chunks
        is_next = info.chunk == expected_chunk and (
            info.update > self._update if expected_chunk == 0 else info.update == self._update
        )
        # PRIVACY: chunks of two logical batches must never meet in one sum, and none may enter twice.
        if not is_next or self._chunks_done == self.plan.num_chunks:
            raise PrivacyViolationError(
                f"Physical batch {info.chunk} of logical batch {info.update} came after {self._chunks_done} of"
                f" {self.plan.num_chunks} batches of logical batch {self._update}: an update was left out or repeated."
                " Let Lightning's loop, or one `optimizer.step()` for each batch, drive the training; an epoch that is"
                " cut short (`on_train_batch_start` returning -1) must end between updates."
            )
        self._update, self._open = info.update, True
        # A forward pass since the last batch, in a callback say, left what belongs to no update.
        self.gradients.forget()
        self.gradients.refresh()
        self.gradients.num_rows = max(1, info.num_records)
        self.guard.before_forward()
        return info

    def check_forward(self) -> None:
        """Checks what ``training_step`` did with the batch at hand; see :class:`~lightning_dp.gradients.StepGuard`."""
        info = self.loader.info
        # A step that took its backward pass too has no inputs left to check; those rows were counted then.
        self.guard.after_forward(max(1, info.num_records) if info is not None else 1)

    def end_chunk(self) -> None:
        """Clips and adds the gradients of the open physical batch; no raw gradient is left afterwards.

        Raises:
            PrivacyViolationError: There is no open batch: a second backward pass on one batch.
        """
        info = self.loader.info
        if info is None or not self._open:
            self.gradients.forget()
            self.gradients.drop_raw()
            raise PrivacyViolationError(
                "A second backward pass ran on one batch, so a record could count twice. Add the losses up and run one"
                " backward pass a step."
            )
        self._open, self.gradients.num_rows = False, None
        self._sum.add_chunk(info.num_records)
        self._chunks_done += 1

    @property
    def usual_size(self) -> int:
        """Expected number of records of a physical batch, 1 at least."""
        return max(1, round(self.plan.expected_batch_size / self.plan.num_chunks / self.plan.world_size))

    def change_clip_norm(self, max_norm: float) -> None:
        """Replaces the clip norm of the next update."""
        self._sum.clipping = Clipping(self.clipping.rule, max_norm)

    def sample(self, rate: float) -> list[Any]:
        """A Poisson sample of the records, the same on all processes and part of no update."""
        plan, dataset = self.plan, self.loader.chunks.dataset
        sampler = PoissonSampler(
            num_records=plan.num_records, sampling_rate=rate, updates_per_epoch=1, stream=self._sampling
        )
        return [dataset[int(i)] for i in sampler.selection(_CLIP_NORM_STRETCH)]

    def random_records(self, count: int) -> list[Any]:
        """Some records of the data set, drawn at random: its first ones may all be of one class."""
        dataset = self.loader.chunks.dataset
        generator = self._sampling.generator(_PROBE_STRETCH)
        chosen = generator.choice(self.plan.num_records, min(count, self.plan.num_records), replace=False)
        return [dataset[int(i)] for i in chosen]

    def release(self, *, is_global_zero: bool, reduce: Callable[[Tensor], Tensor]) -> None:
        """Writes the release down, adds noise, and hands the gradient of the logical batch to the optimizer.

        Raises:
            PrivacyViolationError: Not every physical batch of the logical batch took part exactly once.
            BudgetExceededError: The budget allows no further update.
        """
        if self._chunks_done != self.plan.num_chunks or self._open:
            raise PrivacyViolationError(
                f"An optimizer step came after {self._chunks_done} of {self.plan.num_chunks} physical batches of an"
                " update. Take one step, with one evaluation of the loss, for each logical batch."
            )
        if self.updates_allowed is not None and self.updates_run >= self.updates_allowed:
            raise BudgetExceededError(
                f"The budget allows {self.updates_allowed} updates in this run and they are spent; one more was asked"
                " for. Raise `epsilon`, the noise multiplier, or stop."
            )
        # PRIVACY: spent before it is visible, so that no failure below can leave a release unrecorded.
        self.ledger.record(self.mechanism, release_id=self.release_id)
        self.updates_run += 1
        self._chunks_done = 0
        self._sum.release(
            noise_multiplier=self.noise_multiplier,
            # PRIVACY: once, on one process; each update reads its own stretch of the secret stream.
            stream=self._noise if is_global_zero else None,
            index=self._update,
            reduce=reduce,
            divide_by=self.plan.expected_batch_size,
        )

    def close(self) -> None:
        """Removes the hooks, what they stored, and every sum that was not released."""
        if self._open:
            self.gradients.drop_raw()
        self.gradients.detach()
        self._sum.reset()


def _known(value: _T | None) -> _T:
    if value is None:
        raise PrivacyViolationError(
            "The private run was asked for a fact before Lightning reached the step that sets it."
        )
    return value
