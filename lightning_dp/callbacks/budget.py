"""Holds a privacy budget: finds the noise that meets it, and stops before it is overspent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from lightning_dp import _validate
from lightning_dp.accounting import Mechanism, calibrate_noise_multiplier
from lightning_dp.callbacks.monitor import PrivacyMonitor
from lightning_dp.errors import BudgetExceededError
from lightning_dp.strategies import Budget

_LEAST_SHARE = 1e-3  # of the budget, below which training on is refused


class PrivacyBudget(PrivacyMonitor):
    """Keeps a run within (epsilon, delta): add/remove adjacency, everything in the ledger included.

    If the strategy has no noise multiplier, the smallest one that lets all planned updates fit is found before the
    first update, from the Trainer's ``max_epochs`` and ``max_steps``. If it has one, training stops, gracefully, at the
    last update that fits. In both cases the strategy checks again before each release. Reports as
    :class:`PrivacyMonitor` does.

    Args:
        epsilon: The budget, greater than 0.
        delta: In (0, 1), and below one over the number of records.
        statement: Whether to print the statements.
        metrics: Names of the logged metrics that the closing statement shows; all that start with ``val`` if ``None``.

    Raises:
        InvalidValueError: A value is out of range.

    Example:
        >>> import lightning.pytorch as pl, lightning_dp as ldp
        >>> budget = ldp.PrivacyBudget(epsilon=3, delta=1e-5)
        >>> trainer = pl.Trainer(strategy="private", callbacks=[budget], max_epochs=1, logger=False, accelerator="cpu")
    """

    def __init__(
        self, epsilon: float, delta: float, *, statement: bool = True, metrics: Sequence[str] | None = None
    ) -> None:
        super().__init__(delta, statement=statement, metrics=metrics)
        self.epsilon = _validate.positive("epsilon", epsilon)

    @property
    @override
    def budget(self) -> Budget:
        return Budget(self.epsilon, self.delta)

    @override
    def choose_noise_multiplier(self, *, sampling_rate: float, num_updates: int, spent: Mechanism) -> float:
        already = spent.epsilon(self.delta)
        if already > self.epsilon * (1 - _LEAST_SHARE):
            raise BudgetExceededError(
                f"The budget of epsilon = {self.epsilon:g} at delta = {self.delta:g} is spent but for a trace: what the"
                f" ledger holds costs {already:.6g}. Noise that fits {num_updates} more updates into the rest would"
                " leave nothing of the model. Raise `epsilon`, or stop here."
            )
        return calibrate_noise_multiplier(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling_rate=sampling_rate,
            num_updates=num_updates,
            spent=spent,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon, "delta": self.delta}
