"""How large the gradients of records are, for choosing a clip norm; what leaves the process must be made private."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_dp.gradients.clipping import Clipping
from lightning_dp.gradients.engine import GradientEngine
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.gradients.probe import silent_replica
from lightning_dp.gradients.rules import FlatClipping


def gradient_norms(
    module: LightningModule,
    batches: Iterable[Sequence[Any]],
    *,
    engine: Callable[[nn.Module], GradientEngine],
    loss: Callable[[LightningModule, list[Any]], Tensor],
) -> Tensor:
    """The norm of each record's gradient at the present parameters. The module is copied and not changed.

    Args:
        module: The user's module, on its device.
        batches: Records, some at a time.
        engine: Makes the gradient engine that will train the module.
        loss: Runs ``training_step`` of a module on a batch of records and returns its loss.

    Returns:
        L2 norms over all trained parameters, ``(records,)``; not finite where a record's gradient is not.

    Raises:
        UnsupportedModelError: The gradient of one record cannot be separated.
    """
    replica = silent_replica(module)
    gradients, found = engine(replica), [torch.zeros(0, device=module.device)]
    with isolate_rng(), torch.enable_grad():
        gradients.attach()
        try:
            for records in batches:
                gradients.num_rows = len(records)
                value = loss(replica, list(records))
                gradients.check_inputs(len(records))
                gradients.prepare(value)
                gradients.backward(value)
                total = FlatGradient(gradients.parameters)
                found.append(gradients.add_clipped(total, len(records), Clipping(FlatClipping(), 1.0)))
        finally:
            gradients.detach()
    return torch.cat(found)
