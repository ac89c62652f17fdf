"""The mechanism against loops written by hand."""

from __future__ import annotations

import copy
import math
import multiprocessing
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, Recorder, make_loader, sum_of_clipped
from scipy import stats
from torch import Tensor

MAX_NORM = 0.3
LEARNING_RATE = 0.5
MOMENTUM = 0.9


class Momentum(Lit):
    """Trains with momentum, so that an error in one update shows in all later ones."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class DoublePrecision(Momentum):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step((batch[0].double(), batch[1]), batch_idx)


def parameters_by_hand(
    start: Lit, recorder: Recorder, num_updates: int, expected_batch_size: float
) -> dict[str, Tensor]:
    """SGD with momentum written out, on the records that the recorder saw."""
    module = copy.deepcopy(start)
    velocity = {name: torch.zeros_like(parameter) for name, parameter in module.named_parameters()}
    for update in range(num_updates):
        total = sum_of_clipped(module, *recorder.records_of_update(update), max_norm=MAX_NORM)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                velocity[name] = MOMENTUM * velocity[name] + total[name] / expected_batch_size
                parameter -= LEARNING_RATE * velocity[name]
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_six_updates_without_noise_equal_a_loop_over_records(
    chunks: int, workers: int, make_private_trainer: TrainerFactory
) -> None:
    module, recorder = Momentum(), Recorder()
    start = copy.deepcopy(module)
    trainer = make_private_trainer(
        strategy={"noise_multiplier": 0.0, "max_grad_norm": MAX_NORM},
        max_steps=6,
        max_epochs=-1,
        accumulate_grad_batches=chunks,
        callbacks=[recorder],
    )
    context = multiprocessing.get_context("fork") if workers else None
    loader = make_loader(32 // chunks, num_workers=workers, multiprocessing_context=context)
    trainer.fit(module, loader)

    sizes = [len(recorder.records_of_update(update)[0]) for update in range(6)]
    assert len(set(sizes)) > 1, "batch sizes must vary, or this is not Poisson sampling"
    assert len(recorder.batches) == 6 * chunks
    by_hand = parameters_by_hand(start, recorder, 6, expected_batch_size=32)
    for name, parameter in module.named_parameters():
        assert torch.allclose(parameter, by_hand[name], rtol=0, atol=1e-6), name


def noise_of(
    module_class: type[Lit], chunks: int, make_private_trainer: TrainerFactory
) -> tuple[list[dict[str, Tensor]], float]:
    """(Applied gradient times the expected batch size, minus the clipped sum by hand) over the noise scale."""
    sigma = 2.0
    module, recorder = module_class(), Recorder()
    trainer = make_private_trainer(
        strategy={"noise_multiplier": sigma, "max_grad_norm": MAX_NORM},
        max_steps=40,
        max_epochs=-1,
        accumulate_grad_batches=chunks,
        callbacks=[recorder],
    )
    trainer.fit(module, make_loader(32 // chunks))
    noises = []
    for update, gradients in enumerate(recorder.gradients):
        module.load_state_dict(recorder.states[update])
        total = sum_of_clipped(module, *recorder.records_of_update(update), max_norm=MAX_NORM)
        noises.append({name: (g * 32 - total[name]) / (sigma * MAX_NORM) for name, g in gradients.items()})
    return noises, sigma


@pytest.mark.parametrize("chunks", [1, 4])
def test_noise_is_standard_normal_in_units_of_sigma_times_the_clip_norm(
    chunks: int, make_private_trainer: TrainerFactory
) -> None:
    """Variance (chi-square) and normality (Kolmogorov-Smirnov), per parameter and in total, 1e-6 false alarms each."""
    noises, _ = noise_of(Momentum, chunks, make_private_trainer)
    parts = {name: torch.cat([noise[name].flatten() for noise in noises]).double() for name in noises[0]}
    parts["total"] = torch.cat(list(parts.values()))
    for name, sample in parts.items():
        square = float((sample**2).sum())
        assert 0.5e-6 < stats.chi2.cdf(square, len(sample)) < 1 - 0.5e-6, name
        assert stats.kstest(sample.numpy(), "norm").pvalue > 1e-6, name


def test_noise_of_different_updates_is_uncorrelated(make_private_trainer: TrainerFactory) -> None:
    """Correlation of successive updates within 4.9 standard errors (false alarm 1e-6)."""
    noises, _ = noise_of(Momentum, 1, make_private_trainer)
    rows = torch.stack([torch.cat([value.flatten() for value in noise.values()]) for noise in noises]).double()
    products = (rows[1:] * rows[:-1]).flatten()
    assert abs(float(products.mean())) < 4.9 / math.sqrt(len(products))


def test_seed_everything_moves_neither_noise_nor_batches(make_private_trainer: TrainerFactory) -> None:
    runs = []
    for _ in range(2):
        pl.seed_everything(1, verbose=False)
        module, recorder = Lit(), Recorder()
        make_private_trainer(max_steps=2, callbacks=[recorder]).fit(module, make_loader())
        runs.append((recorder, recorder.states[0], recorder.gradients))
    (first, start, gradients), (second, other_start, other_gradients) = runs
    assert all(torch.equal(start[name], other_start[name]) for name in start), "the model itself does follow the seed"
    assert first.sizes != second.sizes or not torch.equal(first.batches[0], second.batches[0])
    assert not torch.allclose(gradients[0]["net.0.weight"], other_gradients[0]["net.0.weight"])


def test_an_insecure_seed_repeats_the_run_and_is_stamped(make_private_trainer: TrainerFactory) -> None:
    results: list[Any] = []
    for _ in range(2):
        pl.seed_everything(1, verbose=False)
        module = Lit()
        trainer = make_private_trainer(strategy={"insecure_seed": 7}, max_steps=3)
        trainer.fit(module, make_loader())
        results.append(module.state_dict())
        assert not trainer.strategy.guarantee.is_private
        assert "insecure_seed=7" in str(trainer.strategy.guarantee)
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_double_precision_keeps_its_digits(make_private_trainer: TrainerFactory) -> None:
    module, recorder = DoublePrecision(), Recorder()
    start = copy.deepcopy(module).double()
    trainer = make_private_trainer(
        strategy={"noise_multiplier": 0.0, "max_grad_norm": MAX_NORM},
        max_steps=4,
        precision="64-true",
        callbacks=[recorder],
    )
    trainer.fit(module, make_loader())
    by_hand = parameters_by_hand(start, recorder, 4, expected_batch_size=16)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float64
        assert torch.allclose(parameter, by_hand[name], rtol=0, atol=1e-8), name
