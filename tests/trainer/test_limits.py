"""Settings of the Trainer that say how long it trains and when it validates."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import pytest
from conftest import TrainerFactory
from fixtures import Lit, LitData, Recorder, make_loader
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from trainer_parts import Evaluated, Steps, assert_updates

import lightning_dp


def sampling_rates(trainer: Any) -> list[float]:
    return [entry.mechanism.sampling_rate for entry in trainer.strategy.ledger.entries]


@pytest.mark.parametrize("max_steps", [1, 4, 6, 9])
@pytest.mark.parametrize("chunks", [1, 2])
def test_max_steps_counts_updates(max_steps: int, chunks: int, make_private_trainer: TrainerFactory) -> None:
    steps = Steps()
    trainer = make_private_trainer(
        max_steps=max_steps, max_epochs=-1, accumulate_grad_batches=chunks, callbacks=[steps]
    )
    trainer.fit(Lit(), make_loader(16 // chunks))
    assert_updates(trainer, max_steps)
    assert steps.num_batches == max_steps * chunks


@pytest.mark.parametrize(("max_steps", "max_epochs", "expected"), [(6, 5, 6), (100, 2, 8), (0, 2, 0)])
def test_whichever_of_max_steps_and_max_epochs_comes_first_ends_training(
    max_steps: int, max_epochs: int, expected: int, make_private_trainer: TrainerFactory
) -> None:
    trainer = make_private_trainer(max_steps=max_steps, max_epochs=max_epochs)
    trainer.fit(Lit(), make_loader())
    assert_updates(trainer, expected)


class Slow(Lit):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("chunks", [1, 4])
def test_max_time_ends_training_before_max_epochs(chunks: int, make_private_trainer: TrainerFactory) -> None:
    """4000 updates would take over a minute; the time is up long before."""
    recorder = Recorder()
    trainer = make_private_trainer(
        max_time={"milliseconds": 700}, max_epochs=1000, accumulate_grad_batches=chunks, callbacks=[recorder]
    )
    trainer.fit(Slow(), make_loader(16 // chunks))
    num_updates = len(recorder.gradients)
    assert 1 <= num_updates < 60
    assert_updates(trainer, num_updates)


def test_a_budget_for_max_epochs_is_not_spent_when_max_time_is_up(make_trainer: TrainerFactory) -> None:
    budget = lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5, statement=False)
    trainer = make_trainer(strategy="private", callbacks=[budget], max_time={"milliseconds": 400}, max_epochs=100)
    trainer.fit(Slow(), make_loader())
    expected = lightning_dp.calibrate_noise_multiplier(epsilon=3, delta=1e-5, sampling_rate=0.25, num_updates=400)
    assert trainer.strategy.noise_multiplier == expected
    assert_updates(trainer, trainer.global_step)
    assert 1 <= trainer.global_step < 400
    assert 0 < trainer.strategy.guarantee.epsilon < 2.9


def test_time_to_spare_changes_nothing(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(max_time="00:01:00:00", max_epochs=2)
    trainer.fit(Lit(), make_loader())
    assert_updates(trainer, 8)


@pytest.mark.parametrize(
    ("limit", "chunks", "per_epoch"), [(3, 1, 3), (0.5, 1, 2), (4, 2, 2), (0.75, 2, 3), (100, 1, 4), (1.0, 1, 4)]
)
def test_limit_train_batches_shortens_epochs_and_leaves_the_sampling_rate(
    limit: float, chunks: int, per_epoch: int, make_private_trainer: TrainerFactory
) -> None:
    steps = Steps()
    trainer = make_private_trainer(
        limit_train_batches=limit, accumulate_grad_batches=chunks, max_epochs=3, callbacks=[steps]
    )
    trainer.fit(Lit(), make_loader(16 // chunks))
    assert_updates(trainer, 3 * per_epoch)
    assert steps.num_batches == 3 * per_epoch * chunks
    assert sampling_rates(trainer) == [0.25]


def test_limit_train_batches_of_zero_trains_nothing(make_private_trainer: TrainerFactory) -> None:
    trainer = make_private_trainer(limit_train_batches=0)
    trainer.fit(Lit(), make_loader())
    assert_updates(trainer, 0)
    assert trainer.strategy.guarantee.epsilon == 0


@pytest.mark.parametrize(("fast_dev_run", "expected"), [(True, 1), (3, 3)])
def test_fast_dev_run_makes_whole_updates_of_one_batch_each(
    fast_dev_run: bool | int, expected: int, make_private_trainer: TrainerFactory
) -> None:
    steps = Steps()
    trainer = make_private_trainer(
        fast_dev_run=fast_dev_run, accumulate_grad_batches=2, max_epochs=5, callbacks=[steps]
    )
    trainer.fit(Evaluated(), make_loader(8), make_loader(8, shuffle=False))
    assert_updates(trainer, expected)
    assert steps.num_batches == expected
    assert sampling_rates(trainer) == [8 / 64]
    assert steps.validated_at == [expected]
    assert trainer.accumulate_grad_batches == 2


@pytest.mark.parametrize(
    ("interval", "chunks", "validated_at"),
    [
        (2, 1, [2, 4, 6, 8]),
        (3, 1, [3, 7]),
        (0.5, 1, [2, 4, 6, 8]),
        (0.25, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (4, 2, [2, 4, 6, 8]),
        (3, 2, [1, 3, 5, 7]),
        (1.0, 2, [4, 8]),
    ],
)
def test_val_check_interval_validates_inside_the_epoch(
    interval: float, chunks: int, validated_at: list[int], make_private_trainer: TrainerFactory
) -> None:
    """``interval`` counts physical batches, as in Lightning; validation between those of one update does no harm."""
    steps = Steps()
    trainer = make_private_trainer(val_check_interval=interval, accumulate_grad_batches=chunks, callbacks=[steps])
    trainer.fit(Evaluated(), make_loader(16 // chunks), make_loader(shuffle=False))
    assert_updates(trainer, 8)
    assert steps.validated_at == validated_at


def test_val_check_interval_counts_on_over_epochs(make_private_trainer: TrainerFactory) -> None:
    steps = Steps()
    trainer = make_private_trainer(val_check_interval=5, check_val_every_n_epoch=None, max_epochs=4, callbacks=[steps])
    trainer.fit(Evaluated(), make_loader(), make_loader(shuffle=False))
    assert_updates(trainer, 16)
    assert steps.validated_at == [5, 10, 15]


@pytest.mark.parametrize(("every", "validated_at"), [(1, [4, 8, 12, 16, 20]), (2, [8, 16]), (3, [12])])
def test_check_val_every_n_epoch(every: int, validated_at: list[int], make_private_trainer: TrainerFactory) -> None:
    steps = Steps()
    trainer = make_private_trainer(check_val_every_n_epoch=every, max_epochs=5, callbacks=[steps])
    trainer.fit(Evaluated(), make_loader(), make_loader(shuffle=False))
    assert_updates(trainer, 20)
    assert steps.validated_at == validated_at


@pytest.mark.parametrize(("num_batches", "seen"), [(0, []), (2, [0]), (-1, [0])])
def test_a_sanity_check_comes_before_any_update(
    num_batches: int, seen: list[int], make_private_trainer: TrainerFactory
) -> None:
    steps = Steps()
    trainer = make_private_trainer(num_sanity_val_steps=num_batches, callbacks=[steps])
    trainer.fit(Evaluated(), make_loader(), make_loader(shuffle=False))
    assert_updates(trainer, 8)
    assert steps.sanity_checked_at == seen
    assert steps.validated_at == [4, 8]


class Plateau(Evaluated):
    """Its metric never improves."""

    def on_validation_epoch_end(self) -> None:
        self.log("stuck", 1.0)


@pytest.mark.parametrize(("min_epochs", "epochs"), [(None, 2), (1, 2), (4, 4)])
def test_early_stopping_ends_training_but_not_before_min_epochs(
    min_epochs: int | None, epochs: int, make_private_trainer: TrainerFactory
) -> None:
    trainer = make_private_trainer(min_epochs=min_epochs, max_epochs=10, callbacks=[EarlyStopping("stuck", patience=1)])
    trainer.fit(Plateau(), make_loader(), make_loader(shuffle=False))
    assert_updates(trainer, 4 * epochs)


class StopsInTheMiddle(pl.Callback):
    """Asks to stop after one physical batch."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0 and batch_idx + 1 == self.after:
            trainer.should_stop = True


@pytest.mark.parametrize(("after", "chunks", "updates"), [(2, 1, 2), (3, 1, 3), (4, 2, 2)])
def test_a_stop_inside_an_epoch_keeps_what_was_done(
    after: int, chunks: int, updates: int, make_private_trainer: TrainerFactory
) -> None:
    trainer = make_private_trainer(accumulate_grad_batches=chunks, max_epochs=3, callbacks=[StopsInTheMiddle(after)])
    trainer.fit(Lit(), make_loader(16 // chunks))
    assert_updates(trainer, updates)


@pytest.mark.parametrize(("min_steps", "updates"), [(None, 2), (3, 4), (7, 7)])
def test_a_stop_inside_an_epoch_waits_for_min_steps(
    min_steps: int | None, updates: int, make_private_trainer: TrainerFactory
) -> None:
    """With ``min_steps``, Lightning makes ``min_epochs`` one."""
    trainer = make_private_trainer(min_steps=min_steps, max_epochs=3, callbacks=[StopsInTheMiddle(2)])
    trainer.fit(Lit(), make_loader())
    assert_updates(trainer, updates)


@pytest.mark.parametrize(("chunks", "per_epoch"), [(1, 16), (3, 6), (16, 1)])
def test_accumulate_grad_batches_makes_larger_and_fewer_updates(
    chunks: int, per_epoch: int, make_private_trainer: TrainerFactory
) -> None:
    """64 records in batches of 4; where they do not divide, the last update of an epoch is as large as all others."""
    steps = Steps()
    trainer = make_private_trainer(accumulate_grad_batches=chunks, callbacks=[steps])
    trainer.fit(Lit(), make_loader(4))
    assert_updates(trainer, 2 * per_epoch)
    assert steps.num_batches == 2 * per_epoch * chunks
    assert sampling_rates(trainer) == [4 * chunks / 64]


@pytest.mark.parametrize(("every", "built"), [(0, 1), (1, 4), (2, 2)])
def test_reloaded_loaders_draw_new_batches(every: int, built: int, make_private_trainer: TrainerFactory) -> None:
    data, recorder = LitData(), Recorder()
    trainer = make_private_trainer(reload_dataloaders_every_n_epochs=every, max_epochs=4, callbacks=[recorder])
    trainer.fit(Lit(), datamodule=data)
    assert_updates(trainer, 16)
    assert data.calls.count("train_dataloader") == built
    drawn = {tuple(features[:, 0].tolist()) for features in recorder.batches}
    assert len(drawn) == 16, "two updates drew the same records"
