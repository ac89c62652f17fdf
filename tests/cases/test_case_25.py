"""Case 25: what was spent travels with the checkpoint, and is never lost or counted twice."""

import pytest
import torch
from fixtures import Lit, make_loader

from lightning_dp.errors import LedgerError


class LitWithValidation(Lit):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.fixture
def checkpoints(make_private_trainer, tmp_path):
    """A full and a weights-only file of a run of eight updates."""
    trainer = make_private_trainer(max_epochs=2)
    trainer.fit(Lit(), make_loader())
    full, weights = tmp_path / "full.ckpt", tmp_path / "weights.ckpt"
    trainer.save_checkpoint(full)
    trainer.save_checkpoint(weights, weights_only=True)
    return str(full), str(weights)


@pytest.fixture
def plain_checkpoint(make_trainer, tmp_path):
    """A file of eight updates without privacy."""
    trainer = make_trainer(max_epochs=2)
    trainer.fit(Lit(), make_loader())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    return str(tmp_path / "plain.ckpt")


def test_resumed_run_goes_on_counting(make_private_trainer, checkpoints):
    full, _ = checkpoints
    trainer = make_private_trainer(max_epochs=4)
    trainer.fit(Lit(), make_loader(), ckpt_path=full)
    assert trainer.global_step == trainer.strategy.ledger.num_updates == 16


def test_epsilon_of_a_resumed_run_is_that_of_one_long_run(make_private_trainer, checkpoints):
    full, _ = checkpoints
    resumed, long = make_private_trainer(max_epochs=4), make_private_trainer(max_epochs=4)
    resumed.fit(Lit(), make_loader(), ckpt_path=full)
    long.fit(Lit(), make_loader())
    assert resumed.strategy.guarantee.epsilon == pytest.approx(long.strategy.guarantee.epsilon, rel=1e-6)


def test_resuming_twice_counts_the_common_part_once(make_private_trainer, checkpoints):
    full, _ = checkpoints
    trainer = make_private_trainer(max_epochs=4)
    trainer.fit(Lit(), make_loader(), ckpt_path=full)
    trainer.fit(Lit(), make_loader(), ckpt_path=full)
    # Two branches of eight updates each grew from the same eight.
    assert trainer.strategy.ledger.num_updates == 24


def test_older_checkpoint_never_lowers_the_ledger(make_private_trainer, checkpoints):
    full, weights = checkpoints
    trainer = make_private_trainer(max_epochs=4, strategy={"previous_checkpoints": [full, weights]})
    trainer.fit(Lit(), make_loader(), ckpt_path=full)
    assert trainer.strategy.ledger.num_updates == 16


def test_weights_only_file_holds_the_ledger(checkpoints):
    _, weights = checkpoints
    content = torch.load(weights, weights_only=True)
    assert "optimizer_states" not in content
    assert [entry["count"] for entry in content["lightning_dp"]["ledger"]["entries"]] == [8]


def test_weights_only_file_carries_its_ledger_on(make_private_trainer, checkpoints):
    _, weights = checkpoints
    module = Lit.load_from_checkpoint(weights)
    trainer = make_private_trainer(max_epochs=2, strategy={"previous_checkpoints": [weights]})
    trainer.fit(module, make_loader())
    assert trainer.global_step == 8
    assert trainer.strategy.ledger.num_updates == 16


def test_lightning_itself_does_not_resume_from_a_weights_only_file(make_private_trainer, checkpoints):
    _, weights = checkpoints
    trainer = make_private_trainer(max_epochs=4)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        trainer.fit(Lit(), make_loader(), ckpt_path=weights)
    assert trainer.strategy.ledger.num_updates == 8


@pytest.mark.parametrize("how", ["ckpt_path", "previous_checkpoints"])
def test_steps_without_a_ledger_are_refused(make_private_trainer, plain_checkpoint, how):
    resume, strategy = arguments(how, plain_checkpoint)
    with pytest.raises(LedgerError, match=r"8 training steps but no ledger.*allow_missing_ledger=True") as error:
        make_private_trainer(max_epochs=4, strategy=strategy).fit(Lit(), make_loader(), **resume)
    assert plain_checkpoint in str(error.value)


@pytest.mark.parametrize("how", ["ckpt_path", "previous_checkpoints"])
def test_override_is_stamped_on_the_guarantee(make_private_trainer, plain_checkpoint, how):
    resume, strategy = arguments(how, plain_checkpoint)
    trainer = make_private_trainer(max_epochs=4, strategy={**strategy, "allow_missing_ledger": True})
    trainer.fit(Lit(), make_loader(), **resume)
    assert trainer.global_step == 16
    guarantee = trainer.strategy.guarantee
    assert not guarantee.is_private
    assert plain_checkpoint in guarantee.stamps[0]
    assert "NOT VALID AS STATED" in str(guarantee)


def arguments(how, path):
    return ({"ckpt_path": path}, {}) if how == "ckpt_path" else ({}, {"previous_checkpoints": [path]})


def test_checkpoint_of_public_weights_needs_no_ledger(make_private_trainer, make_trainer, tmp_path):
    trainer = make_trainer(max_epochs=0)
    trainer.fit(Lit(), make_loader())
    trainer.save_checkpoint(tmp_path / "initial.ckpt")
    private = make_private_trainer(max_epochs=2)
    private.fit(Lit(), make_loader(), ckpt_path=tmp_path / "initial.ckpt")
    assert private.strategy.ledger.num_updates == 8
    assert private.strategy.guarantee.is_private


def test_validating_a_checkpoint_spends_nothing(make_private_trainer, checkpoints):
    trainer = make_private_trainer()
    trainer.validate(LitWithValidation(), make_loader(shuffle=False), ckpt_path=checkpoints[0], verbose=False)
    assert trainer.strategy.ledger.num_updates == 8


def test_no_noise_repeats_after_a_resume(make_private_trainer, checkpoints):
    full, _ = checkpoints
    first, second = (Lit() for _ in range(2))
    for module in (first, second):
        make_private_trainer(max_epochs=3).fit(module, make_loader(), ckpt_path=full)
    assert not torch.equal(first.net[0].weight, second.net[0].weight)
