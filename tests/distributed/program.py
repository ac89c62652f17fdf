"""What every process of a distributed test runs: ``program.py SPEC OUT`` trains by a JSON file and writes what it saw.

Each process writes ``OUT.<rank>``: the parameters after every update, the ledger, and the logged metrics.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, random_split

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures import Lit, make_loader

import lightning_dp as ldp


class LitInStep(Lit):
    """Logs in a way that all processes take part in."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shared", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return loss


class LitFailing(Lit):
    """Fails after two updates."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise RuntimeError("out of luck")


class Watcher(pl.Callback):
    """Keeps the parameters after each update."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.states):
            self.states.append(flat(pl_module))


def flat(module: torch.nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def loader_of(spec: dict[str, Any]) -> DataLoader[Any]:
    """All records on all processes, or what people do who shard by hand or split without a seed."""
    rank, loader = int(os.environ.get("LOCAL_RANK", "0")), make_loader(**spec.get("loader", {}))
    if spec.get("data") == "shards":
        return DataLoader(Subset(loader.dataset, range(rank, 63 + rank, 1 + rank)), batch_size=8, shuffle=True)
    if spec.get("data") == "splits":
        part, _ = random_split(loader.dataset, [40, 24], generator=torch.Generator().manual_seed(rank))
        return DataLoader(part, batch_size=8, shuffle=True)
    return loader


def main(spec: dict[str, Any], out: str) -> None:
    """Trains and writes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module = {"in_step": LitInStep, "failing": LitFailing}[spec.get("module", "in_step")]()
    # Every process starts elsewhere.
    torch.manual_seed(100 * int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    settings = {"max_grad_norm": 0.5, "delta": 1e-5, "insecure_seed": 7, **spec["strategy"]}
    ranks, nodes = spec["ranks"], spec.get("nodes", 1)
    kind = ldp.PrivateStrategy if ranks * nodes == 1 else ldp.PrivateDDPStrategy
    watcher = Watcher()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        num_nodes=nodes,
        strategy=kind(**settings),
        callbacks=[watcher],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **spec["trainer"],
    )
    problem = ""
    try:
        trainer.fit(module, loader_of(spec), ckpt_path=spec.get("resume"), weights_only=False)
    except Exception as error:
        problem = str(error)
    if "checkpoint" in spec:
        trainer.save_checkpoint(spec["checkpoint"])
    seen = {
        "states": watcher.states,
        "final": flat(module),
        "ledger": trainer.strategy.ledger.state_dict(),
        "guarantee": str(trainer.strategy.guarantee),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "problem": problem,
    }
    torch.save(seen, f"{out}.{trainer.global_rank}")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
