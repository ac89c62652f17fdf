"""Has the clip norm found before training."""

from __future__ import annotations

import math

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_dp import _packages, _validate
from lightning_dp.errors import InvalidValueError, TrainerSettingsError
from lightning_dp.strategies import ClipNormPolicy, ClipNormQuery, PrivateMechanism

_PER_DECADE = 12  # candidates; steps of 21 %


class ClipNormCalibrator(Callback, ClipNormPolicy):
    """Sets the clip norm to a private quantile of the gradient norms, before the first update.

    The strategy looks at a Poisson sample of the records at the first parameters and chooses by the exponential
    mechanism among norms that are spaced by 21 %. That is an entry in the ledger, so a :class:`PrivacyBudget` finds the
    noise for what is left. A resumed run keeps the norm that its checkpoint has, and spends nothing.

    Norms shrink or grow while training goes on; a rule that follows them is :class:`AdaptiveClipping`, which can start
    from here.

    Args:
        quantile: The share of records whose gradients shall stay as they are, in (0, 1).
        epsilon: Pure epsilon of the choice for a record that is in the sample, add/remove; what is booked is smaller by
            about the share of the records that are.
        expected_records: Expected size of the sample. The share of records covered misses ``quantile`` by about
            ``10 / (epsilon * expected_records)``.
        lowest: Least candidate, greater than 0.
        highest: Largest candidate.

    Raises:
        InvalidValueError: An argument is out of range.

    Source: Smith, Privacy-Preserving Statistical Estimation with Optimal Convergence Rates (2011); the median norm as
    clip norm: Abadi et al. (2016), Section 5.

    Example:
        >>> import lightning.pytorch as pl, lightning_dp as ldp
        >>> callbacks = [ldp.ClipNormCalibrator(), ldp.PrivacyBudget(epsilon=3, delta=1e-5)]
        >>> trainer = pl.Trainer(strategy="private", callbacks=callbacks, max_epochs=1, logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        quantile: float = 0.5,
        *,
        epsilon: float = 0.2,
        expected_records: int = 1000,
        lowest: float = 1e-4,
        highest: float = 1e4,
    ) -> None:
        _packages.watch_for_other_package()
        self.quantile = _validate.probability("quantile", quantile)
        if self.quantile == 1:
            raise InvalidValueError("`quantile` must be below 1, got 1: the largest norm has no private estimate.")
        self.epsilon = _validate.positive("epsilon", epsilon)
        self.expected_records = _validate.integer("expected_records", expected_records, minimum=1)
        self.lowest, self.highest = _validate.positive("lowest", lowest), _validate.positive("highest", highest)
        if self.lowest >= self.highest:
            raise InvalidValueError(f"`lowest={lowest!r}` must be below `highest={highest!r}`.")

    @property
    @override
    def clip_norm_query(self) -> ClipNormQuery:
        steps = max(1, round(_PER_DECADE * math.log10(self.highest / self.lowest)))
        ratio = (self.highest / self.lowest) ** (1 / steps)
        candidates = tuple(self.lowest * ratio**i for i in range(steps + 1))
        return ClipNormQuery(self.quantile, self.epsilon, self.expected_records, candidates)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _packages.check_package(trainer)
        # PRIVACY: with another strategy nothing is private, however many of these callbacks there are.
        if stage == "fit" and not isinstance(trainer.strategy, PrivateMechanism):
            raise TrainerSettingsError(
                f"`ClipNormCalibrator` is in the callbacks, but the strategy is `{type(trainer.strategy).__name__}`,"
                " which trains without privacy. Use `Trainer(strategy='private')`."
            )
