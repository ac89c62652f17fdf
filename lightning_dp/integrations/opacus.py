"""The exact accountant as one of Opacus', known to it as ``"contour"`` once ``lightning_dp`` is imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from opacus.accountants import IAccountant, register_accountant
from opacus.optimizers import DPOptimizer

from lightning_dp import _validate
from lightning_dp.accounting.mechanisms import Composition, Gaussian, PoissonSampled
from lightning_dp.errors import InvalidValueError, PrivacyViolationError


class ContourAccountant(IAccountant):  # type: ignore[misc]  # Opacus has no types
    """Exact epsilon under add/remove adjacency for loops that Opacus makes private.

    The history is Opacus' own, a list of ``(noise_multiplier, sample_rate, steps)``, and so are the saved states. To
    go on with a run that another accountant has followed, hand its history over:
    ``accountant.history = list(rdp_accountant.history)``.

    As every accountant of Opacus', it assumes that batches are Poisson sampled. After
    ``make_private(poisson_sampling=False)`` its number holds for other batches than those that were drawn.

    Example:
        >>> from opacus.accountants import create_accountant
        >>> accountant = create_accountant("contour")
        >>> for _ in range(1000):
        ...     accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        >>> round(accountant.get_epsilon(delta=1e-5), 4)
        1.8282
    """

    history: list[tuple[float, float, int]]

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def mechanism(cls) -> str:
        """The name under which Opacus knows this accountant."""
        return "contour"

    def __len__(self) -> int:
        """Number of entries in the history, which Opacus takes as whether anything was spent."""
        return len(self.history)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Books one update.

        Args:
            noise_multiplier: Standard deviation of the noise over the clip norm.
            sample_rate: Probability of each record to be in the batch, in (0, 1].
        """
        if self.history and tuple(self.history[-1][:2]) == (noise_multiplier, sample_rate):
            self.history[-1] = (noise_multiplier, sample_rate, self.history[-1][2] + 1)
        else:
            PoissonSampled(Gaussian(noise_multiplier), sample_rate)  # refuses what could not be read out later
            self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta: float, *, poisson: bool = True, **_: Any) -> float:
        """Smallest epsilon of all updates so far, never below the true one.

        Args:
            delta: In (0, 1).
            poisson: Opacus' word for how batches were drawn; only Poisson sampling has a profile here.
            **_: What Opacus hands to every accountant: precision settings of others, which an exact number does not
                need, and the optimizer's options out of ``make_private_with_epsilon``.

        Raises:
            InvalidValueError: If ``delta``, ``poisson`` or an entry of the history lies outside its range.
        """
        if not poisson:
            raise InvalidValueError(
                f"`poisson` must be True, got {poisson!r}: a number for Poisson batches does not hold for batches that"
                " were drawn otherwise. Let Opacus sample (`make_private(poisson_sampling=True)`)."
            )
        return self.composition().epsilon(delta)

    def composition(self) -> Composition:
        """The history as a value that composes with other releases about the same records."""
        return Composition(
            (PoissonSampled(Gaussian(noise_multiplier), sample_rate), _whole(steps))
            for noise_multiplier, sample_rate, steps in self.history
        )

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[DPOptimizer], None]:
        """What Opacus' optimizer calls after every update.

        Args:
            sample_rate: Probability of each record to be in one batch.

        Returns:
            A function that books the update, or raises :class:`~lightning_dp.errors.PrivacyViolationError` before it
            is made if it sums several batches.
        """

        def book(optimizer: DPOptimizer) -> None:
            # PRIVACY: a record may be in several of k independent batches that are summed, and then adds more than the
            # clip norm. One batch at rate k*q, as which Opacus books them, costs up to a quarter less.
            batches = optimizer.accumulated_iterations
            if batches != 1:
                raise PrivacyViolationError(
                    f"An update sums the gradients of {batches} batches, in which a record may be more than once: no"
                    " sampling rate describes that. Call `optimizer.step()` after every batch, and split large batches"
                    " with `opacus.utils.batch_memory_manager.BatchMemoryManager`. The update was not made."
                )
            self.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=sample_rate)

        return book

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the history of a state that a ``"contour"`` accountant wrote, possibly read back from JSON.

        Args:
            state_dict: What ``state_dict`` returned; it is copied.

        Raises:
            ValueError: If it is no such state, or one of another accountant.
        """
        super().load_state_dict(state_dict)
        self.history = [(noise_multiplier, rate, steps) for noise_multiplier, rate, steps in self.history]


def _whole(steps: float) -> int:
    """Opacus divides epochs by rates, and does not insist on whole numbers; epsilon grows with the steps."""
    return math.ceil(_validate.non_negative("steps", steps))


# Forced, because a module may be imported again, which Opacus would refuse.
register_accountant(ContourAccountant.mechanism(), ContourAccountant, force=True)
