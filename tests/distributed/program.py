"""What every process of a distributed test runs: ``program.py SPEC OUT`` trains by a JSON file and writes what it saw.

Each process writes ``OUT.<rank>``: the parameters after every update, which records it had in each, the ledger, what
it logged and printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Subset, random_split

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures import Lit, make_loader, make_records

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


class LitValidated(LitInStep):
    """Is validated, and keeps on how many records and by which sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append(len(batch[1]))
        self.log("val_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


class Watcher(pl.Callback):
    """Keeps the parameters and clip norm after each update, and which records went into it on this process."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.norms: list[float] = []
        self.taken: list[list[int]] = []
        self.samplers: list[str] = []
        self._place = {float(row[0]): place for place, (row, _) in enumerate(make_records())}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.val_dataloaders is not None:
            self.samplers.append(type(trainer.val_dataloaders.sampler).__name__)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        if len(self.taken) == trainer.global_step:
            self.taken.append([])
        real = (batch[0] != 0).any(dim=1)
        self.taken[-1] += [self._place[float(first)] for first in batch[0][real, 0]]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.states):
            self.states.append(flat(pl_module))
            self.norms.append(trainer.strategy.run.clipping.max_norm)  # type: ignore[attr-defined]


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
    kinds = {"in_step": LitInStep, "failing": LitFailing, "validated": LitValidated}
    module = kinds[spec.get("module", "in_step")]()
    if "seed_everything" in spec:
        pl.seed_everything(spec["seed_everything"])
    else:
        # Every process starts elsewhere.
        torch.manual_seed(100 * int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    settings = {"max_grad_norm": 0.5, "delta": 1e-5, "insecure_seed": 7, **spec["strategy"]}
    if "clipping" in spec:
        rule, arguments = spec["clipping"]
        settings["clipping"] = getattr(ldp, rule)(**arguments)
    extra = [getattr(ldp, name)(**arguments) for name, arguments in spec.get("callbacks", {}).items()]
    ranks, nodes = spec["ranks"], spec.get("nodes", 1)
    kind = ldp.PrivateStrategy if ranks * nodes == 1 else ldp.PrivateDDPStrategy
    watcher = Watcher()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        num_nodes=nodes,
        strategy=kind(**settings),
        callbacks=[watcher, *extra],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(spec["logs"], name="", version="") if "logs" in spec else False,
        **spec["trainer"],
    )
    validation = DataLoader(make_records(), batch_size=8) if isinstance(module, LitValidated) else None
    problem, printed = "", io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            trainer.fit(module, loader_of(spec), validation, ckpt_path=spec.get("resume"), weights_only=False)
    except Exception as error:
        problem = str(error)
    if "checkpoint" in spec:
        trainer.save_checkpoint(spec["checkpoint"])
    seen = {
        "states": watcher.states,
        "final": flat(module),
        "norms": watcher.norms,
        "taken": watcher.taken,
        "validated": getattr(module, "validated", []),
        "samplers": watcher.samplers,
        "printed": printed.getvalue(),
        "ledger": trainer.strategy.ledger.state_dict(),
        "guarantee": str(trainer.strategy.guarantee),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "problem": problem,
    }
    torch.save(seen, f"{out}.{trainer.global_rank}")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
