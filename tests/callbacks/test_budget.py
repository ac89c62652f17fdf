"""Budgets: the noise they find and where they stop."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from conftest import TrainerFactory
from fixtures import Lit, make_loader

import lightning_dp
from lightning_dp import errors


def test_the_noise_found_spends_the_whole_budget_and_not_more(make_trainer: TrainerFactory) -> None:
    trainer = make_trainer(strategy="private", callbacks=[lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)])
    trainer.fit(Lit(), make_loader())
    guarantee = trainer.strategy.guarantee
    assert 2.997 <= guarantee.epsilon <= 3.0
    assert guarantee.num_updates == 8
    assert guarantee.num_records == 64


@pytest.mark.parametrize("settings", [{"max_epochs": 3}, {"max_steps": 5}, {"max_epochs": 2, "max_steps": 3}])
def test_the_number_of_updates_is_the_trainers_own(make_trainer: TrainerFactory, settings: dict[str, int]) -> None:
    trainer = make_trainer(
        strategy="private", callbacks=[lightning_dp.PrivacyBudget(epsilon=2, delta=1e-5)], **settings
    )
    trainer.fit(Lit(), make_loader())
    assert 1.998 <= trainer.strategy.guarantee.epsilon <= 2.0


@pytest.mark.parametrize("min_epochs", [None, 50])
def test_training_with_fixed_noise_stops_at_the_last_update_that_fits(
    make_private_trainer: TrainerFactory, min_epochs: int | None
) -> None:
    budget = lightning_dp.PrivacyBudget(epsilon=8, delta=1e-5)
    trainer = make_private_trainer(max_epochs=100, min_epochs=min_epochs, callbacks=[budget])
    trainer.fit(Lit(), make_loader())
    step = lightning_dp.PoissonSampled(lightning_dp.Gaussian(1.0), 0.25)
    done = trainer.global_step
    assert 0 < done < 400
    assert trainer.strategy.ledger.num_updates == done
    assert (done * step).epsilon(1e-5) <= 8 < ((done + 1) * step).epsilon(1e-5)


def test_an_endless_run_with_fixed_noise_is_stopped_by_its_budget(make_private_trainer: TrainerFactory) -> None:
    budget = lightning_dp.PrivacyBudget(epsilon=5, delta=1e-5)
    trainer = make_private_trainer(max_epochs=-1, callbacks=[budget])
    trainer.fit(Lit(), make_loader())
    assert 4 < trainer.strategy.guarantee.epsilon <= 5


def test_the_settings_of_the_trainer_come_back_after_a_stop(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(max_epochs=100, callbacks=[lightning_dp.PrivacyBudget(epsilon=8, delta=1e-5)])
    trainer.fit(Lit(), make_loader())
    assert trainer.max_steps == -1


def test_a_spent_budget_allows_no_second_run(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(max_epochs=100, callbacks=[lightning_dp.PrivacyBudget(epsilon=8, delta=1e-5)])
    trainer.fit(Lit(), make_loader())
    done = trainer.strategy.ledger.num_updates
    with pytest.raises(errors.BudgetExceededError):
        trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.num_updates == done


def test_noise_for_the_rest_of_a_resumed_run_takes_account_of_what_was_spent(
    make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    def run(max_epochs: int, epochs_planned: int, ckpt_path: str | None = None) -> pl.Trainer:
        budget = lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)
        trainer = make_trainer(
            strategy="private", callbacks=[budget, _StopAfter(max_epochs)], max_epochs=epochs_planned
        )
        trainer.fit(Lit(), make_loader(), ckpt_path=ckpt_path)
        return trainer

    first = run(2, epochs_planned=4)
    assert first.strategy.guarantee.epsilon < 2.9
    first.save_checkpoint(tmp_path / "half.ckpt")
    second = run(4, epochs_planned=4, ckpt_path=str(tmp_path / "half.ckpt"))
    assert second.strategy.ledger.num_updates == second.global_step == 16
    assert 2.997 <= second.strategy.guarantee.epsilon <= 3.0
    multipliers = {entry.mechanism.mechanism.noise_multiplier for entry in second.strategy.ledger.entries}  # type: ignore[attr-defined]
    assert max(multipliers) == pytest.approx(min(multipliers), rel=1e-3)


def test_a_trace_of_a_budget_is_not_spent_on_noise_that_ruins_the_model(
    make_trainer: TrainerFactory, tmp_path: Path
) -> None:
    trainer = make_trainer(strategy="private", callbacks=[lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)])
    trainer.fit(Lit(), make_loader())
    trainer.save_checkpoint(tmp_path / "done.ckpt")
    longer = make_trainer(
        strategy="private", callbacks=[lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)], max_epochs=4
    )
    with pytest.raises(errors.BudgetExceededError, match="but for a trace"):
        longer.fit(Lit(), make_loader(), ckpt_path=str(tmp_path / "done.ckpt"))
    assert longer.strategy.ledger.num_updates == 8


class _StopAfter(pl.Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def test_a_budget_that_no_update_fits_into_is_refused_before_the_first(make_private_trainer: TrainerFactory) -> None:
    budget = lightning_dp.PrivacyBudget(epsilon=0.1, delta=1e-5)
    trainer = make_private_trainer(callbacks=[budget])
    with pytest.raises(errors.BudgetExceededError, match="noise multiplier"):
        trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.num_updates == 0


def test_the_guard_before_a_release_holds_when_the_loop_does_not_stop(make_private_trainer: TrainerFactory) -> None:
    """A callback that lifts `max_steps` again meets the strategy's own check."""

    class Lifting(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
            trainer.fit_loop.epoch_loop.max_steps = -1

    budget = lightning_dp.PrivacyBudget(epsilon=8, delta=1e-5)
    trainer = make_private_trainer(max_epochs=100, callbacks=[budget, Lifting()])
    with pytest.raises(errors.BudgetExceededError):
        trainer.fit(Lit(), make_loader())
    assert trainer.strategy.guarantee.epsilon <= 8
