"""Looks for what would void the guarantee, on a copy of the module, before the first update.

The bound on one record rests on its gradient depending on that record alone. The probe runs ``training_step`` on a few
records and compares rows: with autograd's own gradient, across batch sizes, and after replacing the other records.
Only pass or fail leaves it.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_dp.errors import MixedRecordsError, PrivacyError, UnsupportedModelError
from lightning_dp.gradients.clipping import record_norms
from lightning_dp.gradients.engine import GradientEngine
from lightning_dp.gradients.graph import survey

NUM_RECORDS = 16
_TRIES = 6
_DRAWS = 4


class IndependenceProbe:
    """Checks one module on a few records.

    Args:
        module: The user's module, on its device, without hooks. It is copied and not changed.
        engine: Makes the gradient engine that will train the module.
        loss: Runs ``training_step`` of a module on a batch of records and returns its loss.
        tolerance: Largest accepted relative difference between two rows that should be equal.
        usual_size: Number of records in a batch of the user's own loader.
        accept_mixed: Collect in ``findings`` what ties records together, instead of raising it.

    Attributes:
        findings: What was accepted.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        engine: Callable[[nn.Module], GradientEngine],
        loss: Callable[[LightningModule, list[Any]], Tensor],
        tolerance: float,
        usual_size: int,
        accept_mixed: bool = False,
    ) -> None:
        self.findings: list[MixedRecordsError] = []
        self._accept_mixed = accept_mixed
        self._replica = silent_replica(module)
        self._originals = {id(parameter) for parameter in module.parameters()}
        self._gradients = engine(self._replica)
        self._loss, self._tolerance, self._usual_size = loss, tolerance, usual_size

    def run(self, records: Sequence[Any]) -> None:
        """Runs every check that the number of ``records`` allows; ``NUM_RECORDS`` are enough for all.

        Raises:
            UnsupportedModelError: A check failed; the message names the check, the parameter or module, and a remedy.
            MixedRecordsError: The same, and ``accept_mixed`` would let it pass.
        """
        with isolate_rng(), torch.enable_grad():
            self._gradients.attach()
            try:
                with self._collecting():
                    self._check_state(records[:2])
                takes_part = self._check_rows(records[:3])
                if takes_part and len(records) >= 4:
                    with self._collecting():
                        self._check_batch_size(records)
                    with self._collecting():
                        self._check_others(records)
            finally:
                self._gradients.detach()

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except MixedRecordsError as error:
            if not self._accept_mixed:
                raise
            self.findings.append(error)

    def _rows(self, records: Sequence[Any], seed: int = 1) -> dict[str, Tensor]:
        self._forward_backward(records, seed)
        return self._gradients.take_rows(len(records), pressed=True)

    def _forward_backward(self, records: Sequence[Any], seed: int = 1) -> None:
        _same_dropout(seed)
        self._gradients.num_rows = len(records)
        with _InnermostModule(self._replica) as innermost:
            try:
                loss = self._loss(self._replica, list(records))
                self._check_copied(loss)
                self._gradients.prepare(loss)
                torch.autograd.backward(loss)
            except PrivacyError:
                raise
            except Exception as error:
                self._gradients.detach()
                raise self._explain(error, records, innermost.describe()) from error

    def _check_copied(self, loss: Tensor) -> None:
        # PRIVACY: nothing of what runs on the original is seen, so every check would pass.
        if survey(loss, (), self._originals).uncovered:
            raise UnsupportedModelError(
                f"`training_step` of a copy of `{type(self._replica).__name__}` runs on the parameters of the original,"
                " so it cannot be checked that one record's gradient depends on that record alone. A function or a"
                " compiled method that was put on it or on one of its layers holds the original itself: in place of"
                " `torch.compile(module)` compile its parts (`self.net = torch.compile(self.net)`), and override"
                " methods in a subclass."
            )

    def _explain(self, error: Exception, records: Sequence[Any], where: str) -> Exception:
        """Tells apart what per-record gradients cannot do, what a batch of another size cannot do, and a user's bug."""
        what = f"in {where}: {type(error).__name__}: {error}"
        if self._runs(records):
            return UnsupportedModelError(
                f"Per-record gradients cannot be computed {what}{self._explain_spread()} Replace the layer, for example"
                " by `PrivateStrategy(replace_unsupported=True)`, write `x = x + y` in place of `x += y`, or freeze it."
            )
        if self._runs(list(itertools.islice(itertools.cycle(records), self._usual_size))):
            return UnsupportedModelError(
                f"`training_step` fails on a batch of {len(records)} records, {what} Under private training the number"
                " of records varies from batch to batch, so no part of the model may fix it; read it from the batch"
                " instead."
            )
        return error  # the user's own mistake, which has nothing to do with privacy

    def _explain_spread(self) -> str:
        if not self._gradients.spread:
            return ""
        table = min(self._gradients.spread)
        return (
            f" `{table}` was given one row of indices for the whole batch, and looked them up once for each record; so"
            " what it puts out must not be repeated again."
        )

    def _runs(self, records: Sequence[Any]) -> bool:
        """Whether forward and backward work without hooks."""
        try:
            torch.autograd.backward(self._loss(self._replica, list(records)))
        except Exception:  # whatever it is, the answer is no
            return False
        return True

    def _check_state(self, records: Sequence[Any]) -> None:
        before = {name: value.clone() for name, value in self._state().items()}
        self._rows(records)
        for name, value in self._state().items():
            if name in before and not torch.equal(before[name], value):
                raise MixedRecordsError(
                    f"`{name}` is changed by `training_step` itself. It would carry private records out of the run"
                    " without noise, for example as a running statistic in the checkpoint. Keep it fixed during"
                    " training, or replace the layer that updates it."
                )

    def _state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, and the buffers that it leaves out."""
        metrics = tuple(
            f"{name}." for name, layer in self._replica.named_modules() if isinstance(layer, Metric) and name
        )
        buffers = {name: value for name, value in self._replica.named_buffers() if not name.startswith(metrics)}
        return {**buffers, **self._replica.state_dict()}

    def _check_rows(self, records: Sequence[Any]) -> bool:
        """Compares rows with autograd's gradient; whether any parameter takes part in the loss at all."""
        self._forward_backward(records)
        expected = {name: gradient.clone() for name, gradient in self._gradients.raw_gradients()}
        rows = self._gradients.take_rows(len(records), pressed=True)
        scale = torch.stack([g.float().norm() for g in expected.values()]).norm() if expected else torch.tensor(0.0)
        for name, gradient in expected.items():
            error = (rows[name].mean(0) - gradient).norm()
            if error > self._tolerance * scale:
                raise UnsupportedModelError(
                    f"The per-record gradients of `{name}` do not add up to its gradient (relative difference"
                    f" {float(error / scale):.2g}): it is also used outside the forward of its module, where one"
                    " record's share cannot be seen. Call the module instead of reading its parameter, or freeze it."
                )
        return bool(rows)

    def _check_batch_size(self, records: Sequence[Any]) -> None:
        few, many = self._rows(records[:2]), self._rows(records[:4])
        part, deterministic = slice(0, 2), self._deterministic(records[:4])
        if self._is_doubled(few, many, part) if deterministic else self._grows(records):
            raise UnsupportedModelError(
                "The gradient of one record grows with the size of its batch, twofold from 2 to 4 records: the loss is"
                " a sum over records. Every gradient would be multiplied by the batch size and clipped away. Return the"
                ' mean over the records, for example with `reduction="mean"`.'
            )
        if deterministic:
            self._compare(few, many, part, "the number of records in its batch")

    def _is_doubled(self, few: dict[str, Tensor], many: dict[str, Tensor], part: slice) -> bool:
        if not bool((record_norms([row[part] for row in few.values()]) > 0).any()):
            return False
        return self._largest_change({name: 2 * row for name, row in few.items()}, many, part)[1] <= self._tolerance

    def _grows(self, records: Sequence[Any]) -> bool:
        """Whether the first two rows grow with the number of records, where dropout changes them at random too."""

        def size(chosen: Sequence[Any]) -> float:
            rows = [self._rows(chosen, seed) for seed in range(1, _DRAWS + 1)]
            return sum(float(record_norms([row[:2] for row in found.values()]).sum()) for found in rows)

        # One draw may well double a row by chance, so several are added up, and the batch grows as far as it can.
        return size(records) > size(records[:2]) * math.sqrt(len(records) / 2)

    def _check_others(self, records: Sequence[Any]) -> None:
        """Keeps the records of middling gradient and replaces the others, from the smallest gradients to the largest.

        Losses that pick records (the hardest ones, say) are sure to pick differently then.
        """
        norms = record_norms(list(self._rows(records).values()))
        ranked = [records[int(i)] for i in norms.argsort()]
        half = len(ranked) // 4
        start = (len(ranked) - half) // 2
        kept, others = ranked[start : start + half], ranked[:start] + ranked[start + half :]
        reference = self._rows(kept + others[:half])
        last = len(others) - half
        for first in sorted({round(last * attempt / _TRIES) for attempt in range(1, _TRIES + 1)}):
            rows = self._rows(kept + others[first : first + half])
            self._compare(reference, rows, slice(0, half), "the other records of its batch")

    def _deterministic(self, records: Sequence[Any]) -> bool:
        """Whether the first two rows ignore the random numbers drawn for the rest of the batch (no dropout)."""
        first, second = self._rows(records, seed=1), self._rows(records, seed=2)
        return all(torch.equal(row, first[name]) for name, row in second.items())

    def _compare(self, one: dict[str, Tensor], other: dict[str, Tensor], part: slice, what: str) -> None:
        name, change = self._largest_change(one, other, part)
        if change > self._tolerance:
            raise MixedRecordsError(
                f"The gradient of one record for `{name}` depends on {what} (relative change {change:.2g}),"
                " so clipping it does not bound that record's influence. Compute the loss of each record from that"
                " record alone and average: no batch statistics, no contrastive or mixed records, no mean over"
                " tokens (`lightning_dp.per_record_mean` instead) or class weights of the whole batch."
            )

    def _largest_change(self, one: dict[str, Tensor], other: dict[str, Tensor], part: slice) -> tuple[str, float]:
        """The parameter whose rows differ most, and by how much relative to the largest row over all parameters."""
        scale = record_norms([row[part] for row in one.values()]).max().clamp(min=torch.finfo(torch.float32).tiny)
        changes = {
            name: float((row[part] - other[name][part]).norm() / scale) if name in other else 1.0
            for name, row in one.items()
        }
        worst = max(changes, key=changes.__getitem__)
        return worst, changes[worst]


def silent_replica(module: LightningModule) -> LightningModule:
    """A copy that logs nothing and shares the trainer of the original."""
    try:
        replica = copy.deepcopy(module)
    except Exception as error:
        raise UnsupportedModelError(
            f"`{type(module).__name__}` cannot be copied ({type(error).__name__}: {error}), and the check that one"
            " record's gradient depends on that record alone runs on a copy. Keep tensors with a history, open files"
            " and locks out of the module's attributes. `torch.nn.utils.weight_norm` and `torch.nn.utils.prune` leave"
            " such tensors: use `torch.nn.utils.parametrizations.weight_norm`, and a mask as a parametrization."
        ) from error
    replica.trainer = module.trainer
    mute(replica)
    return replica


def mute(module: LightningModule) -> None:
    """Makes ``module.log`` and ``module.log_dict`` do nothing, on this instance."""
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, _ignore)


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for ``log``."""


def _same_dropout(seed: int) -> None:
    """Makes two runs draw the same numbers; the caller's generators are isolated and private noise has its own."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class _InnermostModule(AbstractContextManager["_InnermostModule"]):
    """Remembers which submodule is running, so that an error can name it."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._running: list[str] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> _InnermostModule:
        for name, layer in self._root.named_modules():
            self._handles.append(layer.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            self._handles.append(layer.register_forward_hook(lambda *_: self._leave()))
        return self

    def _leave(self) -> None:
        self._running.pop()

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def describe(self) -> str:
        path = self._running[-1] if self._running else ""
        owner = f"module `{path}` " if path else "the module itself "
        return f"{owner}({type(self._root.get_submodule(path)).__name__})"
