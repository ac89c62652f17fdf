"""Case 01: private training of an unedited module is switched on by two words."""

import warnings

import pytest
import torch
from fixtures import Lit, attributes_of, make_loader

import lightning_dp


def test_module_trains_and_ledger_counts_every_update(make_private_trainer):
    module, trainer = Lit(), make_private_trainer(max_epochs=2)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    trainer.fit(module, make_loader(batch_size=16))

    assert trainer.strategy.ledger.num_updates == trainer.global_step == 8
    assert all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_state_dict_keys_are_the_modules_own(make_private_trainer):
    module = Lit()
    make_private_trainer().fit(module, make_loader())
    assert list(module.state_dict()) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


def test_nothing_is_left_on_the_module(make_private_trainer):
    module = Lit()
    make_private_trainer().fit(module, make_loader())
    assert attributes_of(module) == attributes_of(Lit())


def test_optimizer_is_the_users_own(make_private_trainer):
    trainer = make_private_trainer()
    trainer.fit(Lit(), make_loader())
    assert type(trainer.optimizers[0]) is torch.optim.SGD


def test_strategy_name_and_budget_are_enough(make_trainer):
    budget = lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5, statement=False)
    trainer = make_trainer(strategy="private", callbacks=[budget])
    trainer.fit(Lit(), make_loader())
    guarantee = trainer.strategy.guarantee
    assert (guarantee.num_updates, guarantee.delta, guarantee.num_records) == (8, 1e-5, 64)
    assert guarantee.epsilon == pytest.approx(3, rel=1e-3)
    assert guarantee.epsilon <= 3
    assert guarantee.is_private


def test_training_warns_of_nothing_that_plain_training_does_not(make_private_trainer, make_trainer):
    def warned(trainer):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Lit(), make_loader())
        return {str(warning.message) for warning in caught}

    assert warned(make_private_trainer()) <= warned(make_trainer())
