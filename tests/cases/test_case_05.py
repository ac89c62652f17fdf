"""Case 05: a second epoch, a second fit, a fit after an exception: hooks never stay and never meet themselves."""

import lightning.pytorch as pl
import pytest
from fixtures import Lit, attributes_of, make_loader


class Interrupt(pl.Callback):
    def __init__(self, hook, error):
        self.error = error
        setattr(self, hook, self._fail)

    def _fail(self, *_):
        raise self.error


class LitThatFails(Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2:
            raise RuntimeError("between forward and backward")
        return loss


class WatchHooks(pl.Callback):
    def __init__(self):
        self.during = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.during.append(len(pl_module.net[0]._forward_hooks))


def test_second_trainer_starts_a_ledger_of_its_own(make_private_trainer):
    module = Lit()
    counts = []
    for epochs in (2, 1):
        trainer = make_private_trainer(max_epochs=epochs)
        trainer.fit(module, make_loader())
        counts.append(trainer.strategy.ledger.num_updates)
    assert counts == [8, 4]


def test_second_fit_of_one_trainer_goes_on_in_its_ledger(make_private_trainer):
    module, trainer = Lit(), make_private_trainer(max_epochs=2)
    trainer.fit(module, make_loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates == trainer.global_step == 12


def test_hooks_live_while_training_and_no_longer(make_private_trainer):
    module, watch = Lit(), WatchHooks()
    make_private_trainer(callbacks=[watch]).fit(module, make_loader())
    assert len(watch.during) == 8
    assert set(watch.during) == {1}
    assert not module.net[0]._forward_hooks


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_start", "on_after_backward"])
def test_exception_in_a_callback_leaves_nothing_on_the_module(make_private_trainer, hook):
    module = Lit()
    with pytest.raises(RuntimeError, match="stop here"):
        make_private_trainer(callbacks=[Interrupt(hook, RuntimeError("stop here"))]).fit(module, make_loader())
    assert_unmarked(module, make_private_trainer)


def test_exception_between_forward_and_backward_leaves_nothing_on_the_module(make_private_trainer):
    module, trainer = LitThatFails(), make_private_trainer()
    with pytest.raises(RuntimeError, match="between forward and backward"):
        trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates == 2
    module.__class__ = Lit
    assert_unmarked(module, make_private_trainer)


def test_keyboard_interrupt_leaves_nothing_on_the_module(make_private_trainer):
    module, interrupt = Lit(), Interrupt("on_train_batch_start", KeyboardInterrupt())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        make_private_trainer(callbacks=[interrupt]).fit(module, make_loader())
    assert_unmarked(module, make_private_trainer)


def assert_unmarked(module, make_private_trainer):
    assert attributes_of(module) == attributes_of(Lit())
    trainer = make_private_trainer()
    trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates == 8
