"""The private attributes of Lightning, Opacus and PyTorch that cannot be avoided, in one place.

Each function names what it reaches for, and ``tests/test_compat.py`` fails with a readable message when it moves.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.utils import parametrize
from typing_extensions import override

# Of any number of dimensions.
BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm

_LAYER_ATTRIBUTES = ("activations", "max_batch_len", "ft_compute_sample_grad", "autograd_grad_sample_hooks")


def silence_hook_warning() -> None:
    """Silences a warning of torch's about Opacus' hooks, which work on first layers as they do on others.

    Installed once and not around each backward pass: leaving ``warnings.catch_warnings`` would make Python show other
    warnings again that it had shown already.
    """
    warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed with respect")


def silence_vectorizing_warning() -> None:
    """Silences a warning of torch's about operators that it vectorizes in a slow way; installed once, likewise."""
    warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")


@contextmanager
def fresh_weights() -> Iterator[None]:
    """Makes parametrized weights be computed anew, also inside of ``torch.nn.utils.parametrize.cached()``."""
    enabled, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


def forget_forward(module: nn.Module) -> None:
    """Makes Opacus' hooks forget every forward pass whose backward pass has not run.

    Without it, an extra forward pass leaves ``_forward_counter`` above zero and no later gradient row is completed,
    and the inputs of the batch stay on the layers.
    """
    for layer in module.modules():
        for name in ("activations", "max_batch_len"):
            layer.__dict__.pop(name, None)
    for parameter in module.parameters():
        if hasattr(parameter, "_forward_counter"):
            parameter._forward_counter = 0
        if hasattr(parameter, "_current_grad_sample"):
            del parameter._current_grad_sample


def forget_hooks(module: nn.Module) -> None:
    """Removes what Opacus' ``cleanup`` leaves on the layers: stored inputs, which are private, and bookkeeping."""
    for layer in module.modules():
        for name in _LAYER_ATTRIBUTES:
            layer.__dict__.pop(name, None)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody asked torch to be shown the gradient of ``parameter``."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def transfer(module: LightningModule, batch: Any) -> Any:
    """Brings a batch to the device as Lightning's training loop does, with every user hook on the way."""
    trainer = module.trainer
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def training_step_arguments(trainer: Trainer, batch: Any) -> tuple[Any, ...]:
    """The arguments with which Lightning's loop would call ``training_step``."""
    return tuple(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())


def combined_mode(trainer: Trainer) -> str:
    """How batches of several training loaders are put together."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    return combined._mode


def data_of(trainer: Trainer, *, fitting: bool = True) -> dict[str, Any]:
    """The data with which ``trainer.fit`` was called, as keyword arguments for another ``fit`` or ``validate``."""
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        return {"datamodule": trainer.datamodule}  # type: ignore[attr-defined]
    training, validation = trainer.fit_loop._data_source, trainer.fit_loop.epoch_loop.val_loop._data_source
    sources = {"train_dataloaders": training, "val_dataloaders": validation}
    if not fitting:
        sources = {"dataloaders": validation}
    return {name: source.instance for name, source in sources.items() if not source.is_module()}


def same_state_everywhere(module: nn.Module) -> None:
    """Gives every process the parameters and buffers of the first one."""
    _sync_module_states(module)


class DDPWithResults(DDPStrategy):
    """A strategy that gets something back from processes that were started by ``spawn`` or ``fork`` and end with fit.

    Lightning brings back the weights and the logged metrics, and leaves the strategy as it was before.
    """

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _MultiProcessingLauncher):
            self._launcher = _LauncherWithResults(self, start_method=self._start_method)  # type: ignore[arg-type]

    def results_of_process(self) -> dict[str, Any]:
        """Called in the first process at its end."""
        return {}

    def take_results(self, results: Mapping[str, Any]) -> None:
        """Called in the process that started the others with what the first of them gave."""

    def on_lost_results(self) -> None:
        """Called in the process that started the others when one of them failed while training."""


class _LauncherWithResults(_MultiProcessingLauncher):
    @override
    def launch(self, function: Any, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                trainer.strategy.on_lost_results()  # type: ignore[attr-defined]
            raise

    @override
    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        return {**super().get_extra_results(trainer), "strategy": trainer.strategy.results_of_process()}  # type: ignore[attr-defined]

    @override
    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        trainer.strategy.take_results(extra["strategy"])  # type: ignore[attr-defined]
        super().update_main_process_results(trainer, extra)
