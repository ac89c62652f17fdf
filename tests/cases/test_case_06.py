"""Case 06: the noise that is booked is the noise that is applied."""

import copy

import numpy as np
import pytest
import torch
from fixtures import Lit, Recorder, make_loader, sum_of_clipped
from scipy import stats

FALSE_ALARM = 1e-6
SIGMA, CLIP, EXPECTED_BATCH = 1.3, 0.4, 16


class LitWithOrder(Lit):
    """Writes down the order of what a user's module can observe of one update, and the gradient it sees there."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, event):
        gradients = [parameter.grad for parameter in self.parameters()]
        self.seen.append((event, None if None in gradients else [g.clone() for g in gradients]))

    def training_step(self, batch, batch_idx):
        self.note("closure")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self.note("backward")

    def on_before_optimizer_step(self, optimizer):
        self.note("step")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.note("clip")
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def displacement(make_private_trainer, initial, noise_multiplier):
    module = copy.deepcopy(initial)
    settings = {"noise_multiplier": noise_multiplier, "insecure_seed": 6}
    make_private_trainer(max_steps=1, strategy=settings).fit(module, make_loader())
    return torch.cat(
        [(p - q).detach().flatten() for p, q in zip(module.parameters(), initial.parameters(), strict=True)]
    )


def test_displacement_grows_linearly_in_the_noise_multiplier(make_private_trainer):
    initial = Lit()
    clean, one, three, ten = (displacement(make_private_trainer, initial, sigma) for sigma in (0.0, 1.0, 3.0, 10.0))
    assert (one - clean).norm() > 0
    torch.testing.assert_close(three - clean, 3 * (one - clean), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ten - clean, 10 * (one - clean), rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def residuals(make_private_trainer):
    """Applied gradient minus the clipped sum of a hand-written loop, over ``sigma * C / E[B]``, by parameter."""
    recorder = Recorder()
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "insecure_seed": 6}
    make_private_trainer(strategy=settings, callbacks=[recorder], max_epochs=10).fit(
        Lit(), make_loader(batch_size=EXPECTED_BATCH)
    )

    found = {}
    replica = Lit()
    for update, (state, applied) in enumerate(zip(recorder.states, recorder.gradients, strict=True)):
        replica.load_state_dict(state)
        clean = sum_of_clipped(replica, *recorder.records_of_update(update), CLIP)
        for name, gradient in applied.items():
            noise = (gradient - clean[name] / EXPECTED_BATCH) / (SIGMA * CLIP / EXPECTED_BATCH)
            found.setdefault(name, []).append(noise.flatten().double().numpy())
    return {name: np.concatenate(values) for name, values in found.items()}


def assert_standard_normal(values):
    total = float((values**2).sum())
    tail = min(stats.chi2(len(values)).cdf(total), stats.chi2(len(values)).sf(total))
    assert 2 * tail > FALSE_ALARM, f"standard deviation {values.std():.4f} instead of 1"
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("name", ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"])
def test_noise_of_each_parameter_has_the_declared_deviation(residuals, name):
    assert_standard_normal(residuals[name])


def test_noise_in_total_has_the_declared_deviation(residuals):
    values = np.concatenate(list(residuals.values()))
    assert len(values) == 40 * 195
    assert_standard_normal(values)


def test_noise_of_one_update_tells_nothing_about_the_next(residuals):
    values = residuals["net.0.weight"].reshape(40, -1)
    correlation = (values[1:] * values[:-1]).sum() / np.sqrt((values[1:] ** 2 * values[:-1] ** 2).sum())
    assert 2 * stats.norm.sf(abs(correlation)) > FALSE_ALARM


def test_closure_runs_once_per_update_and_before_clipping(make_private_trainer):
    module = LitWithOrder()
    make_private_trainer(max_epochs=1).fit(module, make_loader())
    assert [event for event, _ in module.seen] == ["closure", "backward", "step", "clip"] * 4


def test_no_hook_sees_a_raw_gradient(make_private_trainer):
    module = LitWithOrder()
    make_private_trainer(max_epochs=1).fit(module, make_loader())
    assert all(gradients is None for event, gradients in module.seen if event == "backward")
    assert all(gradients is not None for event, gradients in module.seen if event == "step")


def test_runs_with_the_same_global_seed_differ_in_batches_and_noise(make_private_trainer):
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        recorder = Recorder()
        make_private_trainer(max_epochs=1, callbacks=[recorder]).fit(Lit(), make_loader())
        runs.append(recorder)
    first, second = runs
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(first.batches, second.batches, strict=True))
    assert not torch.equal(first.gradients[0]["net.0.bias"], second.gradients[0]["net.0.bias"])
