"""Case 04: batches are Poisson from the very first one, and the ledger says what ran."""

import numpy as np
from fixtures import Lit, Recorder, make_loader
from scipy import stats

from lightning_dp import Gaussian, PoissonSampled

FALSE_ALARM = 1e-6


def first_epoch(make_private_trainer, batch_size):
    recorder = Recorder()
    trainer = make_private_trainer(max_epochs=1, callbacks=[recorder], strategy={"insecure_seed": 4})
    trainer.fit(Lit(), make_loader(batch_size=batch_size, count=1024))
    return trainer, recorder


def test_batch_sizes_of_the_first_epoch_are_binomial(make_private_trainer):
    _, recorder = first_epoch(make_private_trainer, batch_size=8)
    sizes = np.array(recorder.sizes)
    assert len(sizes) == 128

    edges = np.array([-1, 4, 6, 7, 8, 9, 11, 1024])  # sizes 0-4, 5-6, 7, 8, 9, 10-11, more
    expected = len(sizes) * np.diff(stats.binom(1024, 8 / 1024).cdf(edges))
    observed, _ = np.histogram(sizes, bins=edges + 0.5)
    assert stats.chisquare(observed, expected).pvalue > FALSE_ALARM


def test_records_of_two_batches_of_the_first_epoch_are_drawn_independently(make_private_trainer):
    _, recorder = first_epoch(make_private_trainer, batch_size=512)
    first, second = (set(map(tuple, features.tolist())) for features in recorder.batches)
    # Were the epoch one shuffled pass, as in plain training, no record would be in both batches.
    common = len(first & second)
    assert stats.binomtest(common, 1024, 0.25).pvalue > FALSE_ALARM


def test_ledger_entry_is_what_the_sampler_ran(make_private_trainer):
    trainer, recorder = first_epoch(make_private_trainer, batch_size=128)
    (entry,) = trainer.strategy.ledger.entries
    assert entry.mechanism == PoissonSampled(Gaussian(1.0), 128 / 1024)
    assert entry.count == len(recorder.batches) == 8
