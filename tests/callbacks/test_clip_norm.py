"""The clip norm that is found before training: right, booked, and paid for once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_dp as ldp
from lightning_dp import errors
from lightning_dp.strategies import ClipNormQuery
from lightning_dp.strategies.clip_norm import excesses, utilities

SURE = {"epsilon": 500.0, "expected_records": 64}  # all records, and next to no noise


def norms_of_records(module: Lit) -> Tensor:
    norms = []
    for features, label in make_loader().dataset:
        gradients = torch.autograd.grad(cross_entropy(module(features[None]), label[None]), list(module.parameters()))
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8])
def test_the_clip_norm_is_the_candidate_nearest_to_the_quantile(
    quantile: float, make_private_trainer: TrainerFactory
) -> None:
    module = Lit()
    norms = norms_of_records(module)
    trainer = make_private_trainer(callbacks=[ldp.ClipNormCalibrator(quantile, **SURE)], max_epochs=1)
    trainer.fit(module, make_loader())
    found = trainer.strategy.run.clipping.max_norm
    covered = float((norms <= found).float().mean())
    candidates = torch.tensor([1e-4 * 10 ** (i / 12) for i in range(97)])
    shares = (norms.unsqueeze(1) <= candidates).float().mean(0)
    assert abs(covered - quantile) == pytest.approx(float((shares - quantile).abs().min()), abs=1e-6)


def test_the_choice_is_booked_with_its_sampling_before_training(make_private_trainer: TrainerFactory) -> None:
    calibrator = ldp.ClipNormCalibrator(epsilon=0.5, expected_records=16)
    trainer = make_private_trainer(callbacks=[calibrator], max_epochs=1)
    trainer.fit(Lit(), make_loader())
    first, training = trainer.strategy.ledger.entries
    choice = ldp.PoissonSampled(ldp.ExponentialMechanism(0.5), 0.25)
    assert (first.purpose, first.mechanism, first.count) == ("clip norm", choice, 1)
    assert (training.purpose, training.count) == ("training", 4)
    together = choice + 4 * ldp.PoissonSampled(ldp.Gaussian(1.0), 0.25)
    assert trainer.strategy.guarantee.epsilon == pytest.approx(together.epsilon(1e-5), rel=1e-6)
    assert trainer.strategy.guarantee.num_updates == 4


@pytest.mark.parametrize("budget_first", [True, False])
def test_a_budget_holds_for_choice_and_training_together(
    budget_first: bool, make_private_trainer: TrainerFactory
) -> None:
    callbacks = [ldp.PrivacyBudget(epsilon=2.0, delta=1e-5, statement=False), ldp.ClipNormCalibrator()]
    trainer = make_private_trainer(
        strategy={"noise_multiplier": None}, callbacks=callbacks if budget_first else callbacks[::-1]
    )
    trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.num_updates == 8
    assert 1.998 <= trainer.strategy.guarantee.epsilon <= 2.0


def test_a_choice_that_would_use_the_budget_up_is_refused_before_it_is_made(
    make_private_trainer: TrainerFactory,
) -> None:
    callbacks = [ldp.PrivacyBudget(epsilon=0.1, delta=1e-5, statement=False), ldp.ClipNormCalibrator(epsilon=0.5)]
    trainer = make_private_trainer(strategy={"noise_multiplier": None}, callbacks=callbacks)
    with pytest.raises(errors.BudgetExceededError, match="With the clip norm, epsilon would be"):
        trainer.fit(Lit(), make_loader())
    assert not trainer.strategy.ledger.entries


def test_a_resumed_run_keeps_its_clip_norm_and_a_new_one_chooses_again(
    make_private_trainer: TrainerFactory, tmp_path: Path
) -> None:
    first = make_private_trainer(callbacks=[ldp.ClipNormCalibrator(**SURE)], max_epochs=1)
    first.fit(Lit(), make_loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    later = make_private_trainer(callbacks=[ldp.ClipNormCalibrator(**SURE)], max_epochs=2)
    later.fit(Lit(), make_loader(), ckpt_path=str(tmp_path / "first.ckpt"))
    assert later.strategy.run.clipping.max_norm == first.strategy.run.clipping.max_norm
    assert [entry.purpose for entry in later.strategy.ledger.entries] == ["clip norm", "training", "training"]
    later.fit_loop.epoch_progress.reset()
    later.fit_loop.max_epochs = 3
    later.fit(Lit(), make_loader())
    assert [entry.purpose for entry in later.strategy.ledger.entries].count("clip norm") == 2


def test_it_is_where_an_adaptive_clip_norm_starts(make_private_trainer: TrainerFactory) -> None:
    strategy = {"clipping": ldp.AdaptiveClipping(learning_rate=1e-9)}
    trainer = make_private_trainer(strategy=strategy, callbacks=[ldp.ClipNormCalibrator(**SURE)], max_epochs=1)
    module = Lit()
    norms = norms_of_records(module)
    trainer.fit(module, make_loader())
    assert float(norms.min()) < trainer.strategy.run.clipping.max_norm < float(norms.max())


def test_the_module_and_the_users_random_numbers_stay_as_they_were(make_private_trainer: TrainerFactory) -> None:
    states = []

    class Watching(Lit):
        def on_train_epoch_start(self) -> None:
            states.append(({n: p.detach().clone() for n, p in self.named_parameters()}, torch.rand(1)))

    module = Watching()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    draws = []
    for callbacks in ([], [ldp.ClipNormCalibrator(**SURE)]):
        module.load_state_dict(start)
        torch.manual_seed(4)
        make_private_trainer(callbacks=callbacks, max_epochs=1).fit(module, make_loader())
        assert all(torch.equal(value, states[-1][0][name]) for name, value in start.items())
        draws.append(states[-1][1])
    assert torch.equal(*draws)


def test_a_loss_that_mixes_records_is_refused_before_anything_is_released(
    make_private_trainer: TrainerFactory,
) -> None:
    class Mixing(Lit):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return cross_entropy(self(batch[0] - batch[0].mean(0)), batch[1])

    trainer = make_private_trainer(callbacks=[ldp.ClipNormCalibrator()])
    with pytest.raises(errors.UnsupportedModelError, match="depends on"):
        trainer.fit(Mixing(), make_loader())
    assert not trainer.strategy.ledger.entries


def test_a_training_step_that_needs_a_later_hook_is_refused_with_the_reason(
    make_private_trainer: TrainerFactory,
) -> None:
    class Late(Lit):
        def on_train_start(self) -> None:
            self.ready = True

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            assert self.ready
            return super().training_step(batch, batch_idx)

    # It is the statement at the start that needs the noise, and with it the clip norm, so early.
    callbacks = [ldp.ClipNormCalibrator(), ldp.PrivacyMonitor(delta=1e-5)]
    trainer = make_private_trainer(callbacks=callbacks)
    with pytest.raises(errors.UnsupportedModelError, match=r"before `on_train_start`.*ready"):
        trainer.fit(Late(), make_loader())
    assert not trainer.strategy.ledger.entries


def test_two_of_them_and_plain_training_are_refused(
    make_private_trainer: TrainerFactory, make_trainer: TrainerFactory
) -> None:
    with pytest.raises(errors.TrainerSettingsError, match="2 callbacks that choose the clip norm"):
        make_private_trainer(callbacks=[ldp.ClipNormCalibrator(), ldp.ClipNormCalibrator()]).fit(Lit(), make_loader())
    with pytest.raises(errors.TrainerSettingsError, match="trains without privacy"):
        make_trainer(callbacks=[ldp.ClipNormCalibrator()]).fit(Lit(), make_loader())


@settings(max_examples=200, deadline=None)
@given(
    norms=st.lists(st.floats(0, 20) | st.just(float("inf")) | st.just(float("nan")), min_size=1, max_size=8),
    quantile=st.floats(0.01, 0.99),
)
def test_one_record_moves_every_utility_by_at_most_the_sensitivity(norms: list[float], quantile: float) -> None:
    query = ClipNormQuery(quantile, 1.0, 10, (0.1, 1.0, 5.0, 10.0))
    with_it, without = (utilities(excesses(torch.tensor(n), query)) for n in (norms, norms[1:]))
    moved = max(abs(a - b) for a, b in zip(with_it, without, strict=True))
    assert moved <= max(quantile, 1 - quantile) + 1e-9


@pytest.mark.parametrize(
    ("settings_", "name"),
    [
        ({"quantile": 1.0}, "quantile"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"expected_records": 0}, "expected_records"),
        ({"lowest": 2.0, "highest": 1.0}, "lowest"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings_: dict[str, Any], name: str) -> None:
    with pytest.raises(errors.InvalidValueError, match=name):
        ldp.ClipNormCalibrator(**settings_)
