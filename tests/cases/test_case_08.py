"""Case 08: physical batches are a matter of memory; updates, steps and schedulers count logical ones."""

import copy

import pytest
import torch
from fixtures import Lit, Recorder, make_loader, sum_of_clipped


class LitWithScheduler(Lit):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LitWithMomentum(Lit):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 1), (4, 4)])
def test_steps_ledger_and_scheduler_agree(make_private_trainer, batch_size, accumulate):
    trainer = make_private_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(LitWithScheduler(), make_loader(batch_size=batch_size))
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert trainer.global_step == trainer.strategy.ledger.num_updates == scheduler.last_epoch == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


def test_max_steps_counts_updates(make_private_trainer):
    module = Lit()
    before = copy.deepcopy(module.state_dict())
    trainer = make_private_trainer(max_steps=4, max_epochs=-1, accumulate_grad_batches=4)
    trainer.fit(module, make_loader(batch_size=4))
    assert trainer.global_step == trainer.strategy.ledger.num_updates == 4
    assert not torch.equal(module.net[0].weight, before["net.0.weight"])


def test_optimizer_keeps_count_of_updates_across_epochs(make_private_trainer):
    trainer = make_private_trainer(max_steps=6, max_epochs=-1, accumulate_grad_batches=4)
    trainer.fit(LitWithScheduler(), make_loader(batch_size=4))
    assert trainer.global_step == trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_six_updates_without_noise_equal_a_loop_over_records(make_private_trainer, accumulate, num_workers):
    module, recorder = LitWithMomentum(), Recorder()
    by_hand = copy.deepcopy(module)
    trainer = make_private_trainer(
        max_steps=6,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=[recorder],
        strategy={"noise_multiplier": 0.0, "max_grad_norm": 0.3},
    )
    trainer.fit(module, make_loader(batch_size=16 // accumulate, num_workers=num_workers))

    optimizer = by_hand.configure_optimizers()
    sizes = set()
    for update in range(6):
        features, labels = recorder.records_of_update(update)
        sizes.add(len(features))
        for name, total in sum_of_clipped(by_hand, features, labels, max_norm=0.3).items():
            by_hand.get_parameter(name).grad = total / 16
        optimizer.step()
    assert len(sizes) > 1
    assert_same_parameters(module, by_hand)


def test_any_chunking_gives_the_same_update(make_private_trainer):
    initial = Lit()
    trained = []
    for accumulate in (1, 2, 8, 16):
        module = copy.deepcopy(initial)
        settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.3, "insecure_seed": 8}
        trainer = make_private_trainer(accumulate_grad_batches=accumulate, strategy=settings)
        trainer.fit(module, make_loader(batch_size=16 // accumulate))
        assert trainer.global_step == 8
        trained.append(module)
    for module in trained[1:]:
        assert_same_parameters(module, trained[0])


def assert_same_parameters(module, other):
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=0, atol=1e-6)
