"""Checks around every forward pass what the probe can only have checked once, before training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp import _compat
from lightning_dp.errors import MixedRecordsError, UnsupportedModelError
from lightning_dp.gradients.engine import GradientEngine, trainable


class StepGuard:
    """Watches one module: what ``training_step`` may not change, and who may not look at gradients.

    Args:
        gradients: The per-record gradients of the module.
        watch_parameters: Whether ``training_step`` must leave parameters alone. Under manual optimization it holds the
            optimizer step, which changes them.
        watch_buffers: Whether ``training_step`` must leave buffers alone.
    """

    def __init__(self, gradients: GradientEngine, *, watch_parameters: bool, watch_buffers: bool = True) -> None:
        self._gradients = gradients
        self._watch_parameters, self._watch_buffers = watch_parameters, watch_buffers
        self._before: dict[str, tuple[int, int]] = {}

    def before_forward(self) -> None:
        """Checks the module and notes its state.

        Raises:
            UnsupportedModelError: A layer mixes records, or a hook could read raw gradients.
        """
        check_layers(self._gradients.module)
        for name, parameter in self._gradients.parameters.items():
            # PRIVACY: such a hook is given the gradient of the batch before it is clipped.
            if _compat.has_gradient_hooks(parameter):
                raise UnsupportedModelError(
                    f"`{name}` has a gradient hook (`Tensor.register_hook`, or a tool that watches gradients). It would"
                    " see the gradient of the batch before clipping and noise. Remove it, and read the private gradient"
                    " in `on_before_optimizer_step`."
                )
        self._before = dict(self._fingerprints())

    def after_forward(self, num_rows: int) -> None:
        """Compares the module with its state before, and the inputs of its layers with the batch.

        Args:
            num_rows: Number of records in the batch, 1 for a null record.

        Raises:
            UnsupportedModelError: ``training_step`` changed state, froze or unfroze parameters, switched a layer, or
                gave a layer something else than one row per record.
        """
        module = self._gradients.module
        check_layers(module)
        changed = sorted(set(trainable(module)) ^ set(self._gradients.parameters))
        if changed:
            raise UnsupportedModelError(
                f"`{changed[0]}` was frozen or unfrozen inside `training_step`, where its gradient cannot be clipped"
                " any more. Do it in `on_train_epoch_start` or `on_train_batch_start`."
            )
        for name, fingerprint in self._fingerprints():
            # PRIVACY: what the forward pass writes into the model leaves the run without noise.
            if self._before.get(name, fingerprint) != fingerprint:
                raise MixedRecordsError(
                    f"`{name}` was changed by `training_step` itself. It would carry private records out of the run"
                    " without noise. Keep it fixed during training, or replace the layer that updates it."
                )
        self._gradients.check_inputs(num_rows)

    def _fingerprints(self) -> Iterator[tuple[str, tuple[int, int]]]:
        module = self._gradients.module
        metrics = tuple(f"{name}." for name, layer in module.named_modules() if isinstance(layer, Metric) and name)
        watched: Iterator[tuple[str, Tensor]] = module.named_buffers() if self._watch_buffers else iter(())
        if self._watch_parameters:
            watched = itertools.chain(module.named_parameters(), watched)
        return ((name, (id(t), t._version)) for name, t in watched if not name.startswith(metrics))


def check_layers(module: nn.Module) -> None:
    """Refuses layers that mix records or write them into the model.

    Raises:
        UnsupportedModelError: The message names the layer's path, the reason and the remedy.
    """
    for path, layer in module.named_modules():
        reason = _reason_against(layer)
        if reason:
            raise UnsupportedModelError(f"`{path}` ({type(layer).__name__}) {reason}")


def _reason_against(layer: nn.Module) -> str | None:
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
        return (
            "has `max_norm`, which rescales the rows that a batch looks up, without noise, so that the weights show"
            " which tokens occur. Set `max_norm=None`."
        )
    active = layer.training or any(p.requires_grad for p in layer.parameters(recurse=False))
    batch_norm = isinstance(layer, _compat.BatchNorm)
    instance_norm = isinstance(layer, _compat.InstanceNorm) and layer.track_running_stats
    if active and (batch_norm or instance_norm):
        what = "mixes the records of a batch" if batch_norm else "keeps statistics of private records"
        return (
            f"{what}, so one record's influence cannot be bounded. Replace it, for example with `torch.nn.GroupNorm`,"
            " or by `PrivateStrategy(replace_unsupported=True)`; or freeze it and keep it in eval mode."
        )
    return None
