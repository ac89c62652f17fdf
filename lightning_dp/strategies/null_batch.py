"""Runs ``training_step`` on a batch without records so that nothing of it is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_dp.gradients.probe import mute


@contextmanager
def unseen(module: LightningModule, *, alone: bool) -> Iterator[None]:
    """Keeps whatever happens inside out of logged values and of the state of every metric of ``module``.

    Args:
        module: The user's module.
        alone: Whether this is the only process. Else, logging that all processes take part in must go on, with a weight
            of 0, since the others would wait for it.
    """
    states = [(metric, _snapshot(metric)) for metric in module.modules() if isinstance(metric, Metric)]
    own: dict[str, Any] = {name: module.__dict__[name] for name in ("log", "log_dict") if name in module.__dict__}
    log = module.log
    mute(module)
    if not alone:
        object.__setattr__(module, "log", partial(_log_without_weight, log))
        object.__setattr__(module, "log_dict", partial(_log_all_without_weight, log))
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            module.__dict__.pop(name, None)
        module.__dict__.update(own)
        for metric, state in states:
            metric.__dict__.update(state)


def _log_without_weight(log: Callable[..., None], name: str, value: Any, *args: Any, **settings: Any) -> None:
    if isinstance(value, Metric) or settings.get("sync_dist", False):
        log(name, value, *args, **{**settings, "batch_size": 0})


def _log_all_without_weight(log: Callable[..., None], values: Mapping[str, Any], *args: Any, **settings: Any) -> None:
    for name, value in values.items():
        _log_without_weight(log, name, value, *args, **settings)


def _snapshot(metric: Metric) -> dict[str, Any]:
    """The attributes of a metric, with its tensors and lists copied since ``update`` may change them in place."""
    return {name: _copied(value) for name, value in metric.__dict__.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if type(value) is list else value
