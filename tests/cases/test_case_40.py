"""Case 40: `gradient_clip_val` clips the noisy gradient, after the release; what it does costs no privacy."""

import copy
from pathlib import Path

import pytest
import torch
from fixtures import Lit, Recorder, make_loader

import lightning_dp

ROOT = Path(__file__).parents[2]


def moved(make_private_trainer, **settings):
    """One SGD step at lr 0.1: the gradient that the optimizer used, and the one that was released before."""
    module, recorder = Lit(), Recorder()
    before = copy.deepcopy(module)
    trainer = make_private_trainer(max_steps=1, callbacks=[recorder], strategy={"noise_multiplier": 30.0}, **settings)
    trainer.fit(module, make_loader())
    steps = [(q - p).detach().flatten() for p, q in zip(module.parameters(), before.parameters(), strict=True)]
    released = torch.cat([gradient.flatten() for gradient in recorder.gradients[0].values()])
    return torch.cat(steps) / 0.1, released, trainer


def test_norm_of_the_noisy_gradient_is_clipped(make_private_trainer):
    used, released, _ = moved(make_private_trainer, gradient_clip_val=0.01)
    assert released.norm() > 1
    assert float(used.norm()) == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(used / used.norm(), released / released.norm(), rtol=0, atol=1e-4)


def test_values_of_the_noisy_gradient_are_clipped(make_private_trainer):
    used, released, _ = moved(make_private_trainer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    torch.testing.assert_close(used, released.clamp(-0.01, 0.01), rtol=0, atol=1e-5)


def test_gradient_is_used_as_released_without_it(make_private_trainer):
    used, released, _ = moved(make_private_trainer)
    torch.testing.assert_close(used, released, rtol=1e-4, atol=1e-5)


def test_it_changes_nothing_of_what_is_booked(make_private_trainer):
    _, _, clipped = moved(make_private_trainer, gradient_clip_val=0.01)
    _, _, plain = moved(make_private_trainer)
    assert clipped.strategy.guarantee == plain.strategy.guarantee


def test_documentation_says_that_it_is_post_processing():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    pages.append(lightning_dp.PrivateStrategy.__doc__)
    about = [" ".join(page.split()) for page in pages if "gradient_clip_val" in page]
    assert any("post-processing" in page for page in about)
