"""Case 15: the sampling rate is the declared batch over N, whatever the length of the loader."""

import pytest
from fixtures import Lit, Recorder, make_loader
from scipy import stats

import lightning_dp
from lightning_dp import Gaussian, PoissonSampled

FALSE_ALARM = 1e-6


@pytest.mark.parametrize(("drop_last", "updates"), [(False, 4), (True, 3)])
def test_rate_of_300_in_1000_records_is_three_tenths(make_private_trainer, drop_last, updates):
    recorder = Recorder()
    trainer = make_private_trainer(max_epochs=5, callbacks=[recorder], strategy={"insecure_seed": 15})
    trainer.fit(Lit(), make_loader(batch_size=300, count=1000, drop_last=drop_last))

    (entry,) = trainer.strategy.ledger.entries
    assert entry.mechanism == PoissonSampled(Gaussian(1.0), 0.3)
    assert entry.count == trainer.global_step == 5 * updates
    draws = len(recorder.sizes) * 1000
    assert stats.binomtest(sum(recorder.sizes), draws, 0.3).pvalue > FALSE_ALARM


def test_rate_may_be_given_and_then_fixes_the_updates_of_an_epoch(make_private_trainer):
    trainer = make_private_trainer(max_epochs=1, strategy={"sampling_rate": 0.3})
    trainer.fit(Lit(), make_loader(batch_size=16, count=1000))
    (entry,) = trainer.strategy.ledger.entries
    assert (entry.mechanism, entry.count) == (PoissonSampled(Gaussian(1.0), 0.3), 4)


def test_statement_shows_rate_and_updates_of_an_epoch(make_private_trainer, capsys):
    trainer = make_private_trainer(max_epochs=1, callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5)])
    trainer.fit(Lit(), make_loader(batch_size=300, count=1000))
    shown = " ".join(capsys.readouterr().out.split())
    assert "q = 0.3, 4 updates an epoch" in shown
    assert "N 1,000" in shown
    assert "300 records" in shown
