"""Case 10: the physical batches of one update are chunks of one logical batch, so no record enters it twice."""

import pytest
from fixtures import Lit, Recorder, make_loader

from lightning_dp import Gaussian, PoissonSampled


@pytest.fixture(scope="module")
def run(make_private_trainer):
    recorder = Recorder()
    trainer = make_private_trainer(max_epochs=10, accumulate_grad_batches=2, callbacks=[recorder])
    trainer.fit(Lit(), make_loader(batch_size=16))
    return trainer, recorder


def test_sampling_rate_is_that_of_the_logical_batch(run):
    trainer, _ = run
    (entry,) = trainer.strategy.ledger.entries
    assert entry.mechanism == PoissonSampled(Gaussian(1.0), 2 * 16 / 64)
    assert entry.count == trainer.global_step == 20


def test_every_update_takes_two_physical_batches(run):
    _, recorder = run
    assert recorder.updates_before == [update for update in range(20) for _ in range(2)]


def test_no_record_enters_one_update_twice(run):
    _, recorder = run
    for update in range(20):
        features, _ = recorder.records_of_update(update)
        assert len(features) > 0
        assert len(set(map(tuple, features.tolist()))) == len(features)


def test_chunks_of_one_update_are_of_equal_size_up_to_one_record(run):
    _, recorder = run
    assert all(abs(a - b) <= 1 for a, b in zip(recorder.sizes[::2], recorder.sizes[1::2], strict=True))
