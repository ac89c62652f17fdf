"""Case 43: epsilon at the edges: nothing spent, no noise, targets small and large, a target already overspent."""

import math

import lightning.pytorch as pl
import pytest
from fixtures import Lit, make_loader

import lightning_dp
from lightning_dp.errors import BudgetExceededError, CalibrationError


class EpsilonAtStart(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        self.epsilon = trainer.strategy.ledger.epsilon(1e-5)


class LogEpsilon(pl.Callback):
    def __init__(self):
        self.logged = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.logged.append(float(trainer.callback_metrics["privacy/epsilon"]))


def test_epsilon_is_zero_before_the_first_update(make_private_trainer):
    start = EpsilonAtStart()
    trainer = make_private_trainer(callbacks=[start])
    assert trainer.strategy.guarantee.epsilon == 0
    trainer.fit(Lit(), make_loader())
    assert start.epsilon == 0
    assert trainer.strategy.guarantee.epsilon > 0


def test_epsilon_is_infinite_without_noise(make_private_trainer):
    monitor, log = lightning_dp.PrivacyMonitor(delta=1e-5), LogEpsilon()
    trainer = make_private_trainer(callbacks=[monitor, log], strategy={"noise_multiplier": 0.0})
    trainer.fit(Lit(), make_loader())
    assert trainer.strategy.guarantee.epsilon == math.inf
    assert not trainer.strategy.guarantee.is_private
    assert log.logged == [math.inf] * 8


def test_logged_epsilon_grows_to_what_the_guarantee_says(make_private_trainer):
    monitor, log = lightning_dp.PrivacyMonitor(delta=1e-5, statement=False), LogEpsilon()
    trainer = make_private_trainer(callbacks=[monitor, log])
    trainer.fit(Lit(), make_loader())
    assert log.logged == sorted(set(log.logged))
    assert log.logged[-1] == pytest.approx(trainer.strategy.guarantee.epsilon, rel=1e-6)


@pytest.mark.parametrize("target", [0.01, 1.0, 3.0, 50.0, 10_000.0])
def test_run_lands_within_a_thousandth_below_its_target_or_says_what_is_reachable(make_trainer, target):
    budget = lightning_dp.PrivacyBudget(epsilon=target, delta=1e-5, statement=False)
    trainer = make_trainer(strategy="private", callbacks=[budget])
    refusal = None
    try:
        trainer.fit(Lit(), make_loader())
    except CalibrationError as error:
        refusal = str(error)
    if refusal is None:
        assert trainer.strategy.ledger.num_updates == trainer.global_step == 8
        assert target * (1 - 1e-3) <= trainer.strategy.guarantee.epsilon <= target
    else:
        assert trainer.strategy.ledger.num_updates == 0
        assert "out of reach" in refusal
        assert "Choose a target" in refusal


@pytest.mark.parametrize("target", [0.01, 3.0, 50.0])
def test_ordinary_targets_are_reached(make_trainer, target):
    budget = lightning_dp.PrivacyBudget(epsilon=target, delta=1e-5, statement=False)
    trainer = make_trainer(strategy="private", callbacks=[budget], max_epochs=1)
    trainer.fit(Lit(), make_loader())
    assert target * (1 - 1e-3) <= trainer.strategy.guarantee.epsilon <= target


@pytest.fixture(scope="module")
def spent(make_private_trainer, tmp_path_factory):
    """A checkpoint of eight updates and their epsilon."""
    trainer = make_private_trainer()
    trainer.fit(Lit(), make_loader())
    path = tmp_path_factory.mktemp("case_43") / "spent.ckpt"
    trainer.save_checkpoint(path)
    return str(path), trainer.strategy.guarantee.epsilon


@pytest.mark.parametrize("how", ["ckpt_path", "previous_checkpoints"])
@pytest.mark.parametrize("noise_multiplier", [None, 1.0])
def test_target_that_is_overspent_is_refused_before_the_first_update(
    make_private_trainer, spent, how, noise_multiplier
):
    path, epsilon = spent
    budget = lightning_dp.PrivacyBudget(epsilon=epsilon / 2, delta=1e-5)
    strategy = {"noise_multiplier": noise_multiplier}
    if how == "previous_checkpoints":
        strategy["previous_checkpoints"] = [path]
    trainer = make_private_trainer(callbacks=[budget], strategy=strategy, max_epochs=4)
    with pytest.raises(BudgetExceededError, match=r"8 updates in the ledger cost") as error:
        trainer.fit(Lit(), make_loader(), ckpt_path=path if how == "ckpt_path" else None)
    assert f"{epsilon:.6g}" in str(error.value)
    assert "Raise `epsilon`" in str(error.value)
    assert trainer.strategy.ledger.num_updates == 8


def test_resumed_run_calibrates_for_what_is_left(make_private_trainer, spent):
    path, epsilon = spent
    budget = lightning_dp.PrivacyBudget(epsilon=epsilon + 1, delta=1e-5, statement=False)
    trainer = make_private_trainer(callbacks=[budget], strategy={"noise_multiplier": None}, max_epochs=4)
    trainer.fit(Lit(), make_loader(), ckpt_path=path)
    assert trainer.global_step == trainer.strategy.ledger.num_updates == 16
    assert (epsilon + 1) * (1 - 1e-3) <= trainer.strategy.guarantee.epsilon <= epsilon + 1


def test_fixed_noise_stops_at_the_last_update_that_fits(make_private_trainer):
    unlimited = make_private_trainer(max_epochs=2)
    unlimited.fit(Lit(), make_loader())
    epsilon = unlimited.strategy.guarantee.epsilon

    budget = lightning_dp.PrivacyBudget(epsilon=epsilon, delta=1e-5, statement=False)
    trainer = make_private_trainer(callbacks=[budget], max_epochs=5, min_epochs=5)
    trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.num_updates == trainer.global_step == 8
    assert trainer.strategy.guarantee.epsilon <= epsilon


def test_endless_run_with_fixed_noise_ends_with_its_budget(make_private_trainer):
    budget = lightning_dp.PrivacyBudget(epsilon=6, delta=1e-5, statement=False)
    trainer = make_private_trainer(callbacks=[budget], max_epochs=-1)
    trainer.fit(Lit(), make_loader())
    spent, one_more = trainer.strategy.ledger, lightning_dp.PoissonSampled(lightning_dp.Gaussian(1.0), 0.25)
    assert spent.epsilon(1e-5) <= 6 < (spent.composition() + one_more).epsilon(1e-5)
