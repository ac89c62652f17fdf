"""Private training on several processes, on one machine or many."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from lightning_dp import _compat
from lightning_dp.strategies.mechanism import PrivateMechanism

_T = TypeVar("_T")
_TIMEOUT = timedelta(minutes=30)  # Lightning's


class PrivateDDPStrategy(PrivateMechanism, _compat.DDPWithResults):
    """Differentially private training on several processes: the same mechanism as :class:`PrivateStrategy`.

    ``Trainer(strategy="private_ddp", devices=2)`` uses it with its defaults; ``"private_ddp_spawn"`` starts processes
    from the one at hand instead of running the script again. All processes draw the same Poisson sample from a shared
    key and each takes its share of it, so one update is one over the union: each record with probability
    ``sampling_rate``, noise once, one sum over processes. The guarantee does not depend on their number.

    There is no wrapper around the module: it would sum raw gradients over processes. Parameters and buffers start as
    those of the first process. The processes trust each other: each knows the key, and one of them adds all the noise.

    Args:
        process_group_backend: ``"gloo"`` or ``"nccl"``. ``None``: the usual one for the device.
        timeout: How long an operation between processes may take.
        start_method: How processes are started: ``"popen"`` runs the script again, the others call a function.
        cluster_environment: How processes find each other. ``None``: as Lightning finds out (torchrun, SLURM, ...).
        settings: Those of the mechanism; see :class:`PrivateStrategy`.

    Example:
        >>> import lightning.pytorch as pl, lightning_dp as ldp
        >>> strategy = ldp.PrivateDDPStrategy(noise_multiplier=1.1, max_grad_norm=0.5, delta=1e-5)
        >>> trainer = pl.Trainer(strategy=strategy, devices=2, max_epochs=1, logger=False, accelerator="cpu")
    """

    strategy_name = "private_ddp"

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: timedelta = _TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        cluster_environment: ClusterEnvironment | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        # The mechanism knows nothing of devices, and has left the defaults there.
        DDPStrategy.__init__(
            self,
            process_group_backend=process_group_backend,
            start_method=start_method,
            cluster_environment=cluster_environment,
            timeout=timeout,
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, start_method in {"private_ddp": "popen", "private_ddp_spawn": "spawn"}.items():
            description = f"Differentially private training on several processes, started by {start_method}"
            strategy_registry.register(name, cls, description=description, start_method=start_method)

    @override
    def setup_distributed(self) -> None:
        super().setup_distributed()
        # Lightning does it for nccl only. The threads of gloo would be killed with the process, which then now and
        # then aborts after all is done, and looks as if training had failed.
        atexit.register(_end_process_group)

    @override
    def configure_ddp(self) -> None:
        # PRIVACY: no `DistributedDataParallel`, which would sum up raw gradients over processes.
        assert self.model is not None
        _compat.same_state_everywhere(self.model)

    @override
    def _from_all_processes(self, value: _T) -> list[_T]:
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, value)
        return found

    @override
    def _sum_over_processes(self, total: Tensor) -> Tensor:
        torch.distributed.all_reduce(total)
        return total

    # -- what comes back from processes that end with `fit` ----------------------------------------------------------

    @override
    def results_of_process(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state_dict(), "delta": self.reporting_delta, "num_records": self._num_records}

    @override
    def take_results(self, results: Mapping[str, Any]) -> None:
        # PRIVACY: the process that called `fit` released nothing itself, and would report that nothing was spent.
        self.ledger.merge(results["ledger"])
        self._policy_delta, self._num_records = results["delta"], results["num_records"]

    @override
    def on_lost_results(self) -> None:
        self.ledger.stamp("processes that trained ended with an error, and what they had spent is unknown")


def _end_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
