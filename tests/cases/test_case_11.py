"""Case 11: at q = 0.02 on 64 records, more than a quarter of the batches are empty, and nothing notices."""

import math

import pytest
import torch
from fixtures import Lit, Recorder, make_loader
from lightning.pytorch.callbacks import EarlyStopping
from scipy import stats

FALSE_ALARM = 1e-6
SETTINGS = {"sampling_rate": 0.02, "insecure_seed": 11}


class LitWithEpochMean(Lit):
    """Logs a mean over the epoch and keeps what went into it."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        features, labels = batch
        loss = torch.nn.functional.cross_entropy(self(features), labels)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        self.log_dict({"epoch_loss_again": loss}, on_step=False, on_epoch=True, batch_size=len(features))
        if bool((features != 0).any()):
            self.losses.append((loss.item(), len(features)))
        return loss


@pytest.fixture(scope="module")
def run(make_private_trainer):
    recorder, module = Recorder(), Lit()
    trainer = make_private_trainer(
        max_epochs=4,
        strategy=SETTINGS,
        callbacks=[recorder, EarlyStopping("train_loss", patience=1000, check_finite=True)],
    )
    trainer.fit(module, make_loader())
    return trainer, recorder, module


def test_training_goes_on_and_books_every_update(run):
    trainer, recorder, _ = run
    assert trainer.global_step == trainer.strategy.ledger.num_updates == 200
    assert 0 in recorder.sizes


def test_parameters_and_logged_loss_stay_finite(run):
    trainer, _, module = run
    assert math.isfinite(trainer.callback_metrics["train_loss"])
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_number_of_empty_batches_is_what_poisson_sampling_gives(run):
    _, recorder, _ = run
    empty = recorder.sizes.count(0)
    assert stats.binomtest(empty, 200, 0.98**64).pvalue > FALSE_ALARM


def test_empty_batch_holds_no_real_record(run):
    _, recorder, _ = run
    for size, features, labels in zip(recorder.sizes, recorder.batches, recorder.labels, strict=True):
        if size == 0:
            assert not features.any()
            assert not labels.any()
        else:
            assert size == len(features)


def test_update_without_records_is_pure_noise_of_the_declared_deviation(run):
    _, recorder, _ = run
    empty = [gradient for size, gradient in zip(recorder.sizes, recorder.gradients, strict=True) if size == 0]
    values = torch.cat([value.flatten() for gradient in empty for value in gradient.values()]) * (0.02 * 64)
    total = float((values.double() ** 2).sum())
    tail = min(stats.chi2(len(values)).cdf(total), stats.chi2(len(values)).sf(total))
    assert 2 * tail > FALSE_ALARM


def test_update_without_records_and_noise_changes_nothing(make_private_trainer):
    recorder, module = Recorder(), Lit()
    trainer = make_private_trainer(max_epochs=1, strategy={**SETTINGS, "noise_multiplier": 0.0}, callbacks=[recorder])
    trainer.fit(module, make_loader())
    for size, gradient in zip(recorder.sizes, recorder.gradients, strict=True):
        assert any(bool(value.any()) for value in gradient.values()) == (size > 0)


def test_logged_means_are_those_of_the_batches_that_hold_records(make_private_trainer):
    module, recorder = LitWithEpochMean(), Recorder()
    trainer = make_private_trainer(max_epochs=1, strategy=SETTINGS, callbacks=[recorder])
    trainer.fit(module, make_loader())
    assert 0 in recorder.sizes
    expected = sum(loss * size for loss, size in module.losses) / sum(size for _, size in module.losses)
    assert float(trainer.callback_metrics["epoch_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(trainer.callback_metrics["epoch_loss_again"]) == pytest.approx(expected, rel=1e-5)


def test_empty_chunks_of_one_update_add_nothing(make_private_trainer):
    module, recorder = Lit(), Recorder()
    settings = {**SETTINGS, "noise_multiplier": 0.0, "max_grad_norm": 1e6}
    trainer = make_private_trainer(max_epochs=1, accumulate_grad_batches=4, strategy=settings, callbacks=[recorder])
    trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates == 50
    replica = Lit()
    for update, (state, gradient) in enumerate(zip(recorder.states, recorder.gradients, strict=True)):
        features, labels = recorder.records_of_update(update)
        replica.load_state_dict(state)
        if len(features) == 0:
            assert not gradient["net.2.bias"].any()
            continue
        loss = torch.nn.functional.cross_entropy(replica(features), labels, reduction="sum") / (0.02 * 64)
        (expected,) = torch.autograd.grad(loss, [replica.net[2].bias])
        torch.testing.assert_close(gradient["net.2.bias"], expected, rtol=1e-4, atol=1e-6)
