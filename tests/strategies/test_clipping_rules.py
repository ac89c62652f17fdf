"""Clipping rules in a run: what is applied, what is released, and what is remembered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, Recorder, make_loader
from lightning.pytorch.loggers import CSVLogger
from scipy import stats
from torch.nn.functional import cross_entropy

import lightning_dp as ldp
from lightning_dp import errors

FALSE_ALARM = 1e-6


class Still(Lit):
    """Stays where it is, so that the norms of its records do."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ClipNorms(pl.Callback):
    """Keeps the clip norm at the start and after each update."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.norms.append(trainer.strategy.run.clipping.max_norm)

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.norms.append(trainer.strategy.run.clipping.max_norm)


def norms_of_records(module: Lit) -> torch.Tensor:
    norms = []
    for features, label in make_loader().dataset:
        loss = cross_entropy(module(features[None]), label[None])
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        norms.append(torch.cat([g.flatten() for g in gradients]).norm())
    return torch.stack(norms)


def test_automatic_clipping_scales_every_record(make_private_trainer: TrainerFactory) -> None:
    recorder, module = Recorder(), Still()
    strategy = {"noise_multiplier": 0.0, "sampling_rate": 1.0, "max_grad_norm": 0.5}
    rule = ldp.AutomaticClipping(stability=0.1)
    make_private_trainer(strategy={**strategy, "clipping": rule}, max_steps=1, callbacks=[recorder]).fit(
        module, make_loader()
    )
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for features, label in make_loader().dataset:
        gradients = torch.autograd.grad(cross_entropy(module(features[None]), label[None]), list(module.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for name, gradient in zip(expected, gradients, strict=True):
            expected[name] += 0.5 * gradient / (norm + 0.1) / 64
    for name, gradient in recorder.gradients[0].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("quantile", [0.25, 0.5, 0.9])
def test_an_adaptive_clip_norm_finds_its_quantile(quantile: float, make_private_trainer: TrainerFactory) -> None:
    seen, module = ClipNorms(), Still()
    rule = ldp.AdaptiveClipping(quantile=quantile)
    strategy = {"noise_multiplier": 0.0, "sampling_rate": 1.0, "max_grad_norm": 50.0, "clipping": rule}
    make_private_trainer(strategy=strategy, max_epochs=-1, max_steps=150, callbacks=[seen]).fit(module, make_loader())
    norms = norms_of_records(module)
    assert seen.norms[1] < seen.norms[0] == 50.0
    # It steps to and fro around the quantile, by at most one step.
    low, high = norms.quantile(quantile - 0.05), norms.quantile(quantile + 0.05)
    assert low * math.exp(-0.2) < seen.norms[-1] < high * math.exp(0.2)


def test_noise_is_relative_to_the_clip_norm_of_each_update(make_private_trainer: TrainerFactory) -> None:
    seen, recorder = ClipNorms(), Recorder()
    rule = ldp.AdaptiveClipping(count_share=0.3, learning_rate=0.5)
    # Next to no records, so that what is released is noise.
    strategy = {"noise_multiplier": 2.0, "sampling_rate": 1e-6, "clipping": rule, "insecure_seed": 3}
    make_private_trainer(strategy=strategy, max_epochs=-1, max_steps=40, callbacks=[seen, recorder]).fit(
        Still(), make_loader()
    )
    expected_batch = 64e-6
    values = torch.cat(
        [
            torch.cat([value.flatten() for value in gradient.values()]).double()
            * (expected_batch / (2.0 * norm / math.sqrt(1 - 0.3)))
            for gradient, norm in zip(recorder.gradients, seen.norms, strict=False)
        ]
    )
    assert len(set(seen.norms)) > 3
    total = float((values**2).sum())
    assert 2 * min(stats.chi2(len(values)).cdf(total), stats.chi2(len(values)).sf(total)) > FALSE_ALARM


def test_the_released_count_has_the_noise_that_is_documented(make_private_trainer: TrainerFactory) -> None:
    """Without records, the logarithm of the clip norm moves by the noise of the count alone."""
    seen, rate = ClipNorms(), 1e-8
    rule = ldp.AdaptiveClipping(quantile=0.5, learning_rate=rate, count_share=0.04)
    strategy = {"noise_multiplier": 2.0, "sampling_rate": 1e-6, "clipping": rule, "insecure_seed": 5}
    make_private_trainer(strategy=strategy, max_epochs=-1, max_steps=300, callbacks=[seen]).fit(Still(), make_loader())
    records = torch.tensor(seen.norms, dtype=torch.float64).log().diff() / rate * 64e-6
    total = float((records / (2.0 / (2 * math.sqrt(0.04)))).square().sum())
    assert 2 * min(stats.chi2(300).cdf(total), stats.chi2(300).sf(total)) > FALSE_ALARM


def test_epsilon_is_that_of_the_noise_multiplier_whatever_the_rule(make_private_trainer: TrainerFactory) -> None:
    spent = set()
    for rule in (None, ldp.AutomaticClipping(), ldp.PerLayerClipping(), ldp.AdaptiveClipping()):
        trainer = make_private_trainer(strategy={"clipping": rule}, max_epochs=1)
        trainer.fit(Lit(), make_loader())
        spent.add(trainer.strategy.guarantee.epsilon)
    assert len(spent) == 1


def test_a_resumed_run_goes_on_with_its_clip_norm_and_a_new_one_does_not(
    make_private_trainer: TrainerFactory, tmp_path: Path
) -> None:
    strategy = {"clipping": ldp.AdaptiveClipping(), "max_grad_norm": 4.0}
    first = make_private_trainer(strategy=strategy, max_epochs=1)
    first.fit(Lit(), make_loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    reached = first.strategy.run.clipping.max_norm
    assert reached != 4.0

    starts = []
    for ckpt_path in (str(tmp_path / "first.ckpt"), None):
        seen = ClipNorms()
        later = make_private_trainer(strategy=strategy, callbacks=[seen])
        later.fit(Lit(), make_loader(), ckpt_path=ckpt_path)
        starts.append(seen.norms[0])
    assert starts == [reached, 4.0]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_the_clip_norm_is_logged_where_it_moves(make_private_trainer: TrainerFactory, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_private_trainer(
        strategy={"clipping": ldp.AdaptiveClipping()},
        logger=logger,
        log_every_n_steps=1,
        callbacks=[ldp.PrivacyMonitor(delta=1e-5, statement=False)],
    )
    trainer.fit(Lit(), make_loader())
    assert float(trainer.callback_metrics["privacy/clip_norm"]) == pytest.approx(trainer.strategy.run.clipping.max_norm)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (None, "0.5 (flat, over all parameters)"),
        (ldp.PerLayerClipping(), "0.5 (split over 2 layers, 0.3536 each)"),
        (ldp.PerLayerClipping(weights={"net.0": 2.0}), "0.5 (split over 2 layers, 0.2236 to 0.4472 each)"),
        (ldp.AutomaticClipping(), "0.5 (automatic, gradients scaled by 0.5 / (norm + 0.01))"),
        (ldp.AdaptiveClipping(), "at present (adaptive, flat, follows the 0.5 quantile of the norms)"),
    ],
)
def test_the_statement_says_how_gradients_are_bounded(
    rule: ldp.ClippingRule | None,
    words: str,
    make_private_trainer: TrainerFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = make_private_trainer(
        strategy={"clipping": rule, "max_grad_norm": 0.5}, max_epochs=1, callbacks=[ldp.PrivacyMonitor(delta=1e-5)]
    )
    trainer.fit(Lit(), make_loader())
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert words in shown


def test_weights_of_layers_that_do_not_exist_are_refused_before_data_is_touched(
    make_private_trainer: TrainerFactory,
) -> None:
    trainer = make_private_trainer(strategy={"clipping": ldp.PerLayerClipping(weights={"encoder": 2.0})})
    with pytest.raises(errors.InvalidValueError, match=r"names `encoder`.*It has `net\.0`, `net\.2`"):
        trainer.fit(Lit(), make_loader())
    assert trainer.strategy.ledger.num_updates == 0


def test_a_rule_of_ones_own_needs_one_method(make_private_trainer: TrainerFactory) -> None:
    class Halved(ldp.ClippingRule):
        def factors(self, norms: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
            return (bounds / norms).clamp(max=0.5)

    recorders = []
    for rule in (Halved(), None):
        recorder = Recorder()
        strategy = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "clipping": rule, "insecure_seed": 1}
        torch.manual_seed(0)
        make_private_trainer(strategy=strategy, max_steps=1, callbacks=[recorder]).fit(Still(), make_loader())
        recorders.append(recorder)
    for name, gradient in recorders[0].gradients[0].items():
        torch.testing.assert_close(2 * gradient, recorders[1].gradients[0][name])
