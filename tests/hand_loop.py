"""Private training of any module on any batch against a loop over records with plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp.errors import UnsupportedModelError

BATCH_SIZE = 6


class Classifier(pl.LightningModule):
    """Trains a net on pairs of input and label; a subclass says what else a batch is, and what a record's loss is."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def losses(self, batch: Any) -> Tensor:
        """The loss of each record."""
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def labelled(*shape: int, count: int = 18, classes: int = 3, tokens: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Records of random features, or of random tokens below ``tokens``, and a label; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    size = (count, *shape)
    inputs = torch.randint(tokens, size, generator=generator) if tokens else torch.randn(size, generator=generator)
    return list(zip(inputs, torch.randint(classes, (count,), generator=generator), strict=True))


def one_by_one(batch: Any, count: int) -> Iterator[Any]:
    """A batch of any structure as batches of one record."""
    for i in range(count):
        yield _part(batch, i)


def _part(batch: Any, i: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[i : i + 1]
    if isinstance(batch, Mapping):
        return type(batch)({key: _part(value, i) for key, value in batch.items()})  # type: ignore[call-arg]
    return type(batch)(_part(value, i) for value in batch)


class Watch(pl.Callback):
    """Keeps what goes into each update and what the optimizer is given for it.

    Attributes:
        batches: Of each physical batch, the batch, how many real records it holds, and its update.
        states: All parameters and buffers before each update.
        gradients: What the optimizer was given, by name.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[Any, int, int]] = []
        self.states: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        info = trainer.strategy.run.loader.info  # type: ignore[attr-defined]
        self.batches.append((copy.deepcopy(batch), info.num_records, trainer.global_step))
        torch.manual_seed(len(self.batches))  # for dropout, see `gradients_together`

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.states.append({name: value.detach().clone() for name, value in pl_module.state_dict().items()})
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


Gradients = list[Tensor]


def gradients_alone(module: Any, wanted: Sequence[nn.Parameter], batch: Any, count: int, seed: int) -> list[Gradients]:
    """The gradient of each record's loss, with the record alone in its batch."""
    return [
        [*torch.autograd.grad(module.training_step(part, 0), wanted, materialize_grads=True)]
        for part in one_by_one(batch, count)
    ]


def gradients_together(
    module: Any, wanted: Sequence[nn.Parameter], batch: Any, count: int, seed: int
) -> list[Gradients]:
    """The gradient of each record's loss, from one forward pass with the random numbers that training drew."""
    torch.manual_seed(seed)
    losses = module.losses(batch)
    return [[*torch.autograd.grad(loss, wanted, materialize_grads=True, retain_graph=True)] for loss in losses[:count]]


def norm_of(gradients: Gradients) -> Tensor:
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()


def middling_norm(module: pl.LightningModule, batch: Any, count: int, of_records: Callable[..., Any]) -> float:
    """A norm that about half of the records of a batch exceed."""
    wanted = [p for p in module.parameters() if p.requires_grad]
    norms = [norm_of(g) for g in of_records(module, wanted, batch, count, 0)]
    return float(torch.stack(norms).median())


def assert_equals_loop(
    make_private_trainer: Callable[..., pl.Trainer],
    module: Any,
    records: Sequence[Any],
    *,
    collate_fn: Any = None,
    together: bool = False,
    callbacks: Sequence[pl.Callback] = (),
    strategy: Mapping[str, Any] | None = None,
    max_steps: int = 3,
    tolerance: float = 1e-9,
    **settings: Any,
) -> pl.Trainer:
    """Trains without noise and compares what the optimizer is given with a loop over records, update by update.

    About half of the records are clipped. Parameters that get no gradient must not move.

    Args:
        make_private_trainer: The fixture.
        module: Knows nothing of privacy.
        records: The data set.
        collate_fn: Of the user's loader.
        together: Whether the loop runs forward once for the whole batch, since the forward pass draws random numbers.
        callbacks: More callbacks.
        strategy: Settings of the strategy.
        max_steps: Number of updates.
        tolerance: Largest error of an update relative to the clip norm.
        settings: Settings of the Trainer.
    """
    torch.manual_seed(0)
    of_records = gradients_together if together else gradients_alone
    loader: DataLoader[Any] = DataLoader(
        records,
        batch_size=BATCH_SIZE,
        shuffle=True,
        collate_fn=collate_fn,  # type: ignore[arg-type]
    )
    watch = Watch()
    precision = settings.setdefault("precision", "64-true")
    first = loader.collate_fn([*records[:8]])
    max_norm = middling_norm(copy.deepcopy(module), first, 8, of_records)
    assert max_norm > 0
    trainer = make_private_trainer(
        strategy={"noise_multiplier": 0.0, "max_grad_norm": max_norm, **(strategy or {})},
        max_steps=max_steps,
        max_epochs=-1,
        callbacks=[*callbacks, watch],
        **settings,
    )
    trainer.fit(module, loader)
    assert trainer.strategy.ledger.num_updates == trainer.global_step == max_steps  # type: ignore[attr-defined]

    num_clipped, expected = 0, trainer.strategy.run.plan.expected_batch_size  # type: ignore[attr-defined]
    parameters = dict(module.named_parameters())
    with trainer.precision_plugin.train_step_context() if precision == "64-true" else torch.enable_grad():
        for update, (state, found) in enumerate(zip(watch.states, watch.gradients, strict=True)):
            module.load_state_dict(state)
            names = [name for name in parameters if name in found]
            wanted = [parameters[name].requires_grad_() for name in names]
            total = [torch.zeros_like(p) for p in wanted]
            for seed, (batch, count, owner) in enumerate(watch.batches, start=1):
                if owner == update and count:
                    for gradients in of_records(module, wanted, batch, count, seed):
                        norm = norm_of(gradients)
                        num_clipped += bool(norm > max_norm)
                        for part, gradient in zip(total, gradients, strict=True):
                            part += gradient * (max_norm / norm).clamp(max=1.0)
            for name, part in zip(names, total, strict=True):
                error = float((found[name] * expected - part).norm())
                assert error <= tolerance * max_norm, f"update {update}, {name}: {error / max_norm:.2g} of the norm"
    assert num_clipped, "nothing was clipped"
    return trainer


def assert_refused(
    make_private_trainer: Callable[..., pl.Trainer],
    module: pl.LightningModule,
    records: Sequence[Any],
    *parts: str,
    updates: int = 0,
    collate_fn: Any = None,
    **settings: Any,
) -> str:
    """Checks that training is refused with a message that holds all ``parts``, after so many updates; returns it."""
    torch.manual_seed(0)
    loader: DataLoader[Any] = DataLoader(
        records,
        batch_size=BATCH_SIZE,
        shuffle=True,
        collate_fn=collate_fn,  # type: ignore[arg-type]
    )
    trainer = make_private_trainer(**settings)
    with pytest.raises(UnsupportedModelError) as error:
        trainer.fit(module, loader)
    message = str(error.value)
    for part in parts:
        assert part in message
    assert trainer.strategy.ledger.num_updates == updates  # type: ignore[attr-defined]
    return message
