"""The engines inside a Trainer: precision, compiled and checkpointed parts, own backward passes, what is logged."""

from __future__ import annotations

import copy
import gc
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, make_loader
from torch import Tensor, nn

from lightning_dp import errors

SETTINGS = {"noise_multiplier": 1.0, "max_grad_norm": 0.3, "insecure_seed": 5}


class LitSequence(Lit):
    """Eight features as two tokens through a small block."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(  # type: ignore[assignment]
            nn.Unflatten(1, (2, 4)), nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Flatten(), nn.Linear(12, 3)
        )


def trained(module: pl.LightningModule, make_private_trainer: TrainerFactory, **settings: Any) -> Tensor:
    """All parameters after two epochs on a copy of the module, as one vector."""
    module = copy.deepcopy(module)
    strategy = {**SETTINGS, **settings.pop("strategy", {})}
    make_private_trainer(strategy=strategy, max_epochs=2, **settings).fit(module, make_loader())
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("memory", ["speed", "balanced", "low", 100])
def test_both_engines_train_the_same_model(memory: str | int, make_private_trainer: TrainerFactory) -> None:
    """Same selections, same noise: what is left is rounding."""
    module = LitSequence()
    hooks = trained(module, make_private_trainer, strategy={"gradient_engine": "hooks"})
    ours = trained(module, make_private_trainer, strategy={"gradient_memory": memory})
    assert torch.allclose(ours, hooks, atol=1e-5)


class Gain(nn.Module):
    """A layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_engines_agree_in_every_precision(precision: str, make_private_trainer: TrainerFactory) -> None:
    module = LitSequence()
    module.net.append(Gain())
    hooks = trained(module, make_private_trainer, precision=precision, strategy={"gradient_engine": "hooks"})
    ours = trained(module, make_private_trainer, precision=precision)
    tolerance = 1e-10 if precision == "64-true" else 2e-2
    assert float((ours - hooks).norm()) <= tolerance * float(hooks.norm())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # torch's own, about its compiler
def test_compiled_parts_train_the_same_model(backend: str, make_private_trainer: TrainerFactory) -> None:
    module = LitSequence()
    plain = trained(module, make_private_trainer)
    torch.manual_seed(0)
    compiled = copy.deepcopy(module)
    compiled.net = torch.compile(compiled.net, backend=backend, dynamic=True)  # type: ignore[assignment]
    make_private_trainer(strategy=SETTINGS, max_epochs=2).fit(compiled, make_loader())
    ours = torch.cat([parameter.detach().double().flatten() for parameter in compiled.parameters()])
    assert torch.allclose(ours, plain, atol=1e-5)
    torch.compiler.reset()


def test_an_overridden_backward_gives_the_same_and_leaves_nothing_raw(make_private_trainer: TrainerFactory) -> None:
    class OwnBackward(LitSequence):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(*args, **kwargs)

        def on_after_backward(self) -> None:
            assert all(parameter.grad is None for parameter in self.parameters())

    own = OwnBackward()
    plain = LitSequence()
    plain.load_state_dict(own.state_dict())
    assert torch.equal(trained(own, make_private_trainer), trained(plain, make_private_trainer))


def test_frozen_layers_cost_nothing(make_private_trainer: TrainerFactory) -> None:
    module = LitSequence()
    module.net[1].requires_grad_(False)
    seen: list[int] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            seen.append(len(module.net[1]._forward_hooks))

    make_private_trainer(strategy=SETTINGS, max_epochs=1, callbacks=[Watch()]).fit(module, make_loader())
    assert set(seen) == {0}


def test_the_choice_is_logged_once_in_the_form_in_which_it_is_pinned(
    make_private_trainer: TrainerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    module = LitSequence()
    with caplog.at_level(logging.INFO, logger="lightning_dp"):
        first = trained(module, make_private_trainer)
    messages = [record for record in caplog.records if "gradient_methods" in record.message]
    assert len(messages) == 1
    methods = messages[0].args
    assert set(methods) == {"net.1.weight"}  # type: ignore[arg-type]
    assert torch.equal(trained(module, make_private_trainer, strategy={"gradient_methods": methods}), first)


def test_an_unknown_method_is_refused_with_those_that_exist(make_private_trainer: TrainerFactory) -> None:
    with pytest.raises(errors.InvalidValueError, match=r"has 'fastest' for `net\.1\.weight`.*'gram'"):
        trained(LitSequence(), make_private_trainer, strategy={"gradient_methods": {"net.1.weight": "fastest"}})


def test_a_method_for_a_parameter_that_is_not_there_is_refused(make_private_trainer: TrainerFactory) -> None:
    with pytest.raises(errors.InvalidValueError, match=r"`net\.9\.weight`, which is no parameter"):
        trained(LitSequence(), make_private_trainer, strategy={"gradient_methods": {"net.9.weight": "gram"}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_engine": "ghost"}, "`gradient_engine` must be one of 'bookkeeping', 'hooks'"),
        ({"gradient_memory": "huge"}, "`gradient_memory` must be one of 'speed', 'balanced', 'low'"),
        ({"gradient_memory": -1}, "`gradient_memory` must be at least 0"),
        ({"gradient_methods": {"net.1.weight": 3}}, "`gradient_methods` must be a mapping"),
    ],
)
def test_engine_settings_are_checked(settings: Any, message: str, make_private_trainer: TrainerFactory) -> None:
    with pytest.raises(errors.InvalidValueError, match=message):
        make_private_trainer(strategy=settings)


class LitWithOwnBackward(LitSequence):
    """Runs the backward pass itself."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class WhatWaitsForCollection(pl.Callback):
    """Names what of this library only the garbage collector could free after each batch."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gc.collect()
        gc.freeze()  # what is there already, of earlier tests too, is nobody's garbage here
        gc.disable()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = {type(thing) for thing in gc.garbage}
        self.found.append({kind.__qualname__ for kind in kinds if kind.__module__.startswith("lightning_dp.")})
        gc.set_debug(0)
        gc.garbage.clear()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        gc.set_debug(0)
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize("kind", [LitSequence, LitWithOwnBackward])
def test_memory_is_free_as_soon_as_a_step_is_over(kind: type[Lit], make_private_trainer: TrainerFactory) -> None:
    callback = WhatWaitsForCollection()
    make_private_trainer(strategy=SETTINGS, max_epochs=1, callbacks=[callback]).fit(kind(), make_loader())
    assert callback.found
    assert not set().union(*callback.found)
