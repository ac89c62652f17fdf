"""What the monitor logs and says."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import lightning_dp
from lightning_dp.callbacks.console import show
from lightning_dp.callbacks.statement import closing_statement


class Validated(Lit):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.fixture
def run(
    make_private_trainer: TrainerFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[pl.Trainer, str]:
    trainer = make_private_trainer(
        callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5)],
        logger=CSVLogger(tmp_path),
        log_every_n_steps=1,
        accumulate_grad_batches=2,
    )
    trainer.fit(Validated(), make_loader(8), make_loader(8, shuffle=False))
    return trainer, capsys.readouterr().out


def test_epsilon_in_the_logs_is_that_of_the_updates_so_far(run: tuple[pl.Trainer, str]) -> None:
    trainer, _ = run
    step = lightning_dp.PoissonSampled(lightning_dp.Gaussian(1.0), 0.25)
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:  # type: ignore[union-attr, arg-type]
        rows = [row for row in csv.DictReader(file) if row["privacy/epsilon"]]
    assert len(rows) == 8
    for count, row in enumerate(rows, start=1):
        assert float(row["privacy/epsilon"]) == pytest.approx((count * step).epsilon(1e-5), rel=1e-5)


def test_epsilon_stands_in_the_progress_bar(run: tuple[pl.Trainer, str]) -> None:
    trainer, _ = run
    assert float(trainer.progress_bar_metrics["privacy/epsilon"]) == pytest.approx(
        trainer.strategy.guarantee.epsilon, rel=1e-5
    )


def test_the_closing_statement_names_every_fact(run: tuple[pl.Trainer, str]) -> None:
    trainer, printed = run
    epsilon = f"epsilon = {math.ceil(trainer.strategy.guarantee.epsilon * 1e4) / 1e4:.4f} at delta = 1e-05"
    facts = dict(closing_statement(trainer, trainer.strategy).facts)  # type: ignore[arg-type]
    assert facts["unit"].startswith("one record")
    assert facts["adjacency"].startswith("add_remove")
    assert facts["N"] == "64 (public)"
    assert "q = 0.25, 4 updates an epoch" in facts["sampling"]
    assert facts["expected batch"] == "16 records, 16 per process"
    assert facts["noise multiplier"] == "1"
    assert facts["clip norm"].startswith("1 ")
    assert facts["updates"] == "8"
    assert facts["guarantee"].startswith(epsilon)
    assert "val_loss" in facts
    assert epsilon.split(" at")[0] in printed
    assert "Private training starts" in printed
    assert "not covered" in printed


def test_without_rich_the_statement_is_plain_text(
    run: tuple[pl.Trainer, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, _ = run
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    show(closing_statement(trainer, trainer.strategy))  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "Private training ended\n" in text
    assert "  Not covered:\n    - " in text


def test_a_run_that_fails_still_says_what_it_spent(
    make_private_trainer: TrainerFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Lit):
        def on_train_epoch_end(self) -> None:
            raise KeyError("mistake")

    trainer = make_private_trainer(callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5)])
    with pytest.raises(KeyError):
        trainer.fit(Failing(), make_loader())
    printed = capsys.readouterr().out
    assert "ended by KeyError" in printed
    assert f"{math.ceil(trainer.strategy.guarantee.epsilon * 1e4) / 1e4:.4f}" in printed
    assert trainer.strategy.guarantee.num_updates == 4


def test_statements_can_be_switched_off(
    make_private_trainer: TrainerFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    make_private_trainer(callbacks=[lightning_dp.PrivacyMonitor(1e-5, statement=False)]).fit(Lit(), make_loader())
    assert "Private training" not in capsys.readouterr().out


def test_a_hidden_size_appears_nowhere(
    make_private_trainer: TrainerFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 records, declared as 80: the rate, the expected batch and the guarantee follow from 80."""
    trainer = make_private_trainer(
        strategy={"public_size": 80}, callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5)], max_epochs=1
    )
    trainer.fit(Lit(), make_loader())
    printed = capsys.readouterr().out
    assert "64" not in printed
    assert "q = 0.2," in printed
    assert trainer.strategy.guarantee.num_records == 80
    assert trainer.strategy.run.plan.expected_batch_size == 16
