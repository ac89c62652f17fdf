"""Keeps a run within its budget: refuses to start when nothing is left, and stops the loop in time."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp.accounting import Ledger, Mechanism, updates_left
from lightning_dp.errors import BudgetExceededError
from lightning_dp.strategies.policy import Budget
from lightning_dp.strategies.run import PrivateRun


def check_open(budget: Budget | None, ledger: Ledger) -> None:
    """Refuses to go on when what the ledger holds has used the budget up.

    Raises:
        BudgetExceededError: Nothing is left.
    """
    if budget is None:
        return
    spent = ledger.epsilon(budget.delta)
    # PRIVACY: equality counts as spent; every further update costs something.
    if spent >= budget.epsilon:
        raise BudgetExceededError(
            f"The budget of epsilon = {budget.epsilon:g} at delta = {budget.delta:g} is spent: the"
            f" {ledger.num_updates} updates in the ledger cost {spent:.6g}. Raise `epsilon`, or stop here."
        )


def check_affordable(budget: Budget | None, ledger: Ledger, mechanism: Mechanism, *, what: str) -> None:
    """Refuses a release that the budget does not allow.

    Args:
        budget: What must not be overspent.
        ledger: What was spent.
        mechanism: What is to be released.
        what: The release in words.

    Raises:
        BudgetExceededError: It would leave nothing.
    """
    if budget is None:
        return
    later = (ledger.composition() + mechanism).epsilon(budget.delta)
    if later >= budget.epsilon:
        raise BudgetExceededError(
            f"With {what}, epsilon would be {later:.6g} at delta = {budget.delta:g}, which leaves nothing of the"
            f" budget of {budget.epsilon:g} for training. Nothing was released. Raise that `epsilon`, or ask for less."
        )


def limit_updates(trainer: Trainer, run: PrivateRun, budget: Budget, remaining: int | None) -> int:
    """Makes the Trainer stop after the last update that fits into the budget.

    Args:
        trainer: Its ``max_steps`` is lowered where the budget ends first.
        run: The run, with its noise fixed.
        budget: What must not be overspent.
        remaining: Updates that the Trainer would run; ``None`` if it has no end.

    Returns:
        How many updates the run may release, at most ``remaining``.

    Raises:
        BudgetExceededError: Not one update fits.
    """
    allowed = updates_left(
        run.mechanism, epsilon=budget.epsilon, delta=budget.delta, spent=run.ledger.composition(), limit=remaining
    )
    if allowed == 0:
        raise BudgetExceededError(
            f"Not one update with noise multiplier {run.noise_multiplier:g} and sampling rate"
            f" {run.mechanism.sampling_rate:g} fits into epsilon = {budget.epsilon:g} at delta = {budget.delta:g}."
            " Raise `epsilon` or the noise multiplier, or lower the batch size."
        )
    if remaining is None or allowed < remaining:
        # `trainer.should_stop` is ignored before `min_epochs`; this is not.
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + allowed
        rank_zero_info(f"The privacy budget allows {allowed} updates; training will stop after them.")
    return allowed
