"""Shared set-up: Trainers that write nothing and print nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_dp

TrainerFactory = Callable[..., pl.Trainer]

# The models are so small that a second thread costs more than it brings.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> TrainerFactory:
    """Makes a plain Trainer on the CPU; every setting can be replaced."""

    def make(**settings: Any) -> pl.Trainer:
        quiet = {
            "accelerator": "cpu",
            "default_root_dir": tmp_path_factory.mktemp("trainer"),
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "max_epochs": 2,
        }
        return pl.Trainer(**{**quiet, **settings})

    return make


@pytest.fixture(scope="session")
def make_private_trainer(make_trainer: TrainerFactory) -> TrainerFactory:
    """Makes a Trainer whose strategy has ``noise_multiplier=1``; ``strategy={...}`` replaces its settings."""

    def make(*, strategy: dict[str, Any] | None = None, **settings: Any) -> pl.Trainer:
        chosen = {"noise_multiplier": 1.0, "delta": 1e-5, **(strategy or {})}
        return make_trainer(strategy=lightning_dp.PrivateStrategy(**chosen), **settings)

    return make
