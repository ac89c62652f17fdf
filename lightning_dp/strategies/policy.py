"""What the mechanism asks of the callbacks: the noise, the budget, and the delta of its reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning.pytorch import Trainer

from lightning_dp import _validate
from lightning_dp.accounting import Mechanism
from lightning_dp.errors import TrainerSettingsError


@dataclass(frozen=True)
class Budget:
    """The most that may be spent, over everything in the ledger.

    Attributes:
        epsilon: Greater than 0.
        delta: In (0, 1).
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        _validate.positive("epsilon", self.epsilon)
        _validate.delta(self.delta)


class PrivacyPolicy(ABC):  # noqa: B024 - every answer has a default
    """Mixed into a callback that decides on privacy settings. The strategy asks; a Trainer has at most one."""

    @property
    def reporting_delta(self) -> float | None:
        """The delta at which epsilon is reported."""
        return None

    @property
    def budget(self) -> Budget | None:
        """What must not be overspent."""
        return None

    def choose_noise_multiplier(self, *, sampling_rate: float, num_updates: int, spent: Mechanism) -> float | None:
        """The noise for ``num_updates`` further updates on top of ``spent``; ``None`` leaves it to the strategy."""
        return None


@dataclass(frozen=True)
class ClipNormQuery:
    """A clip norm that is to be found privately.

    Attributes:
        quantile: The share of gradient norms that it shall cover, in (0, 1).
        epsilon: Pure epsilon of the choice, before sampling.
        expected_records: Expected number of records to look at.
        candidates: Clip norms to choose from.
    """

    quantile: float
    epsilon: float
    expected_records: int
    candidates: tuple[float, ...]


class ClipNormPolicy(ABC):
    """Mixed into a callback that has the clip norm found before the first update. A Trainer has at most one."""

    @property
    @abstractmethod
    def clip_norm_query(self) -> ClipNormQuery:
        """What to find."""


def find_clip_norm_query(trainer: Trainer) -> ClipNormQuery | None:
    """What a callback wants to know before the first update.

    Raises:
        TrainerSettingsError: Several callbacks do.
    """
    found = [callback for callback in trainer.callbacks if isinstance(callback, ClipNormPolicy)]  # type: ignore[attr-defined]
    if len(found) > 1:
        raise TrainerSettingsError(
            f"The Trainer has {len(found)} callbacks that choose the clip norm, and each would spend for it. Keep one."
        )
    return found[0].clip_norm_query if found else None


def find_policy(trainer: Trainer) -> PrivacyPolicy:
    """The callback that decides on privacy, or a policy that leaves everything to the strategy.

    Raises:
        TrainerSettingsError: There are several.
    """
    policies = [callback for callback in trainer.callbacks if isinstance(callback, PrivacyPolicy)]  # type: ignore[attr-defined]
    if len(policies) > 1:
        names = ", ".join(type(policy).__name__ for policy in policies)
        raise TrainerSettingsError(
            f"The Trainer has {len(policies)} callbacks that report on privacy ({names}). Keep one: `PrivacyBudget`"
            " does all that `PrivacyMonitor` does."
        )
    return policies[0] if policies else PrivacyPolicy()
