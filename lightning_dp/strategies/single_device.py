"""Private training on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_dp.errors import TrainerSettingsError
from lightning_dp.strategies.mechanism import PrivateMechanism


class PrivateStrategy(PrivateMechanism, SingleDeviceStrategy):
    """Differentially private training on one device: DP-SGD, add/remove adjacency, unit: one record.

    Trains an unedited ``LightningModule``. ``Trainer(strategy="private")`` uses it with its defaults. One update: draw
    each record with probability ``sampling_rate``; clip each record's gradient to ``max_grad_norm``; add Gaussian noise
    of standard deviation ``noise_multiplier * max_grad_norm`` to the sum; divide by the expected batch size; hand that
    to the user's own optimizer. The physical batches of ``accumulate_grad_batches`` make one update.

    One record is one element of the training data set. Source: Abadi et al., Deep Learning with Differential Privacy
    (2016).

    Example:
        >>> import lightning.pytorch as pl, lightning_dp as ldp
        >>> strategy = ldp.PrivateStrategy(noise_multiplier=1.1, max_grad_norm=0.5, delta=1e-5)
        >>> trainer = pl.Trainer(strategy=strategy, max_epochs=1, logger=False, accelerator="cpu")
    """

    strategy_name = "private"

    _parallel_devices: Sequence[torch.device] = ()

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """The devices that the Trainer chose; exactly one is used."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        # Lightning hands the devices over only to strategies that have this property.
        if len(devices) > 1:
            raise TrainerSettingsError(
                f"`strategy='private'` trains on one device, but the Trainer has {len(devices)}. Use"
                " `strategy='private_ddp'`, or set `devices=1`."
            )
        self._parallel_devices = tuple(devices)

    @property
    def num_nodes(self) -> int:
        """Always 1; the Trainer sets it."""
        return 1

    @num_nodes.setter
    def num_nodes(self, value: int) -> None:
        if value > 1:
            raise TrainerSettingsError(
                f"`strategy='private'` trains on one device, but the Trainer has `num_nodes={value}`. Each node would"
                " train a model of its own. Use `strategy='private_ddp'`, or set `num_nodes=1`."
            )

    @property
    @override
    def root_device(self) -> torch.device:
        return self._parallel_devices[0] if self._parallel_devices else super().root_device
