"""The private attributes of Lightning and Opacus that ``_compat.py`` reaches for: each fails here when it moves."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from fixtures import Lit, LitData, make_loader
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities import CombinedLoader
from opacus.grad_sample import GradSampleHooks

from lightning_dp import _compat, _packages, errors


def test_opacus_counts_forwards_in_the_attribute_that_we_reset() -> None:
    module = torch.nn.Linear(2, 1)
    hooks = GradSampleHooks(module, strict=False)
    module(torch.ones(3, 2))
    assert module.weight._forward_counter == 1, "Opacus moved `_forward_counter`; see _compat.forget_forward"
    assert len(module.activations) == 1, "Opacus moved `activations`; see _compat.forget_forward"
    _compat.forget_forward(module)
    assert module.weight._forward_counter == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(torch.ones(3, 2)).mean().backward()
    assert module.weight.grad_sample.shape == (3, 1, 2)
    hooks.cleanup()


def test_opacus_cleanup_and_ours_leave_nothing() -> None:
    module = torch.nn.Linear(2, 1)
    before = {*vars(module)}
    hooks = GradSampleHooks(module, strict=False)
    module(torch.ones(3, 2))
    hooks.cleanup()
    _compat.forget_hooks(module)
    assert {*vars(module)} == before


def test_arguments_of_training_step_are_those_of_the_loop(make_trainer: TrainerFactory) -> None:
    seen = []

    class WithIndex(Lit):
        def training_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
            seen.append(_compat.training_step_arguments(self.trainer, batch))
            return super().training_step(batch, batch_idx)

    class WithoutIndex(Lit):
        def training_step(self, batch):  # type: ignore[no-untyped-def]
            seen.append(_compat.training_step_arguments(self.trainer, batch))
            return super().training_step(batch, 0)

    for module in (WithIndex(), WithoutIndex()):
        make_trainer(max_steps=1).fit(module, make_loader())
    assert [len(arguments) for arguments in seen] == [2, 1], "Lightning moved `_build_kwargs`"


def test_transfer_runs_the_hooks_of_the_user(make_trainer: TrainerFactory) -> None:
    class Doubling(Lit):
        def on_before_batch_transfer(self, batch, dataloader_idx):  # type: ignore[no-untyped-def]
            return [2 * batch[0], batch[1]]

        def on_train_start(self) -> None:
            moved = _compat.transfer(self, [torch.ones(1, 8), torch.zeros(1)])
            assert moved[0].sum() == 16, "Lightning moved `_on_before_batch_transfer`"

    make_trainer(max_steps=1).fit(Doubling(), make_loader())


def test_data_of_finds_loaders_and_data_modules(make_trainer: TrainerFactory) -> None:
    found = []

    class Spy(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(_compat.data_of(trainer))

    class WithLoader(Lit):
        def train_dataloader(self):  # type: ignore[no-untyped-def]
            return make_loader()

    loader, data = make_loader(), LitData()
    make_trainer(max_steps=1, callbacks=[Spy()]).fit(Lit(), loader)
    make_trainer(max_steps=1, callbacks=[Spy()]).fit(Lit(), datamodule=data)
    make_trainer(max_steps=1, callbacks=[Spy()]).fit(WithLoader())
    assert found == [{"train_dataloaders": loader}, {"datamodule": data}, {}], "Lightning moved `_data_source`"


def test_the_mode_of_combined_loaders_is_found(make_trainer: TrainerFactory) -> None:
    found = []

    class Spy(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(_compat.combined_mode(trainer))

    class First(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    for data in ([make_loader()], CombinedLoader([make_loader()], "min_size")):
        make_trainer(max_steps=1, callbacks=[Spy()]).fit(First(), data)
    assert found == ["max_size_cycle", "min_size"], "Lightning moved `_mode` of its `CombinedLoader`"


def test_the_other_package_is_refused_by_name() -> None:
    with pytest.raises(errors.TrainerSettingsError, match=r"pytorch_lightning.*lightning\.pytorch"):
        _packages.refuse_other_package()


def test_importing_lightning_dp_does_not_import_the_other_package() -> None:
    code = "import sys, lightning_dp; sys.exit('pytorch_lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_lightning_makes_its_launcher_where_we_replace_it() -> None:
    strategy = _compat.DDPWithResults(
        start_method="spawn", cluster_environment=LightningEnvironment(), parallel_devices=[torch.device("cpu")]
    )
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, _compat._LauncherWithResults), "Lightning moved `_configure_launcher`"
    for name in ("launch", "get_extra_results", "update_main_process_results"):
        assert hasattr(_MultiProcessingLauncher, name), f"Lightning moved `{name}` of its launcher"
