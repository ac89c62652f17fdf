"""Runs ``training_step`` on a batch without records so that nothing of it is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_dp.gradients.probe import mute


@contextmanager
def unseen(module: LightningModule) -> Iterator[None]:
    """Keeps whatever happens inside out of logged values and of the state of every metric of ``module``."""
    states = [(metric, _snapshot(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    own: dict[str, Any] = {name: module.__dict__[name] for name in ("log", "log_dict") if name in module.__dict__}
    mute(module)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            module.__dict__.pop(name, None)
        module.__dict__.update(own)
        for metric, state in states:
            metric.__dict__.update(state)


def _snapshot(metric: Metric) -> dict[str, Any]:
    """The attributes of a metric, with its tensors and lists copied since ``update`` may change them in place."""
    return {name: _copied(value) for name, value in metric.__dict__.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if type(value) is list else value
