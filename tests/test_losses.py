"""The mean over records of each record's own mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from hand_loop import Classifier, assert_equals_loop, labelled
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp import errors, per_record_mean


@pytest.mark.parametrize("shape", [(5,), (5, 4), (5, 4, 3)])
@pytest.mark.parametrize("kind", [None, bool, float])
def test_it_is_a_loop_over_records(shape: tuple[int, ...], kind: type | None) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = None if kind is None else (torch.rand(shape) > 0.3) if kind is bool else torch.rand(shape)
    means = []
    for i in range(5):
        weight = torch.ones_like(values[i]) if weights is None else weights[i].to(values.dtype)
        means.append((values[i] * weight).sum() / weight.sum().clamp(min=1e-30))
    expected = torch.stack(means).mean()
    found = per_record_mean(values, weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, values), torch.autograd.grad(expected, values))


def test_what_does_not_count_may_be_infinite_or_no_number() -> None:
    values = torch.tensor([[1.0, torch.inf], [torch.nan, 3.0]], requires_grad=True)
    mean = per_record_mean(values, torch.tensor([[1, 0], [0, 1]]))
    assert mean.item() == 2.0
    (gradient,) = torch.autograd.grad(mean, values)
    assert gradient.tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_a_record_of_which_nothing_counts_adds_nothing() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    assert float(per_record_mean(torch.tensor([[1.0, 3.0], [9.0, 9.0]]), mask)) == 1.0


@pytest.mark.parametrize(
    ("values", "mask", "message"),
    [
        (torch.tensor(1.0), None, "one number for the whole batch"),
        (torch.ones(3, 2), torch.ones(3), r"shape of `values`, \(3, 2\), got \(3,\)"),
        (torch.ones(3), torch.ones(3, 2), "shape of `values`"),
    ],
)
def test_bad_input_is_refused(values: Tensor, mask: Tensor | None, message: str) -> None:
    with pytest.raises(errors.InvalidValueError, match=message):
        per_record_mean(values, mask)


class Tagger(Classifier):
    """A tag for each token of texts of several lengths."""

    def losses(self, batch: Any) -> Tensor:
        tokens = batch[0]
        losses = F.cross_entropy(self(tokens).transpose(1, 2), tokens % 3, reduction="none")
        real = (tokens != 0).to(losses.dtype)
        return (losses * real).sum(1) / real.sum(1).clamp(min=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        losses = F.cross_entropy(self(tokens).transpose(1, 2), tokens % 3, reduction="none")
        return per_record_mean(losses, tokens != 0)


def test_texts_of_several_lengths_train_privately(make_private_trainer: TrainerFactory) -> None:
    records = [(x * (torch.arange(6) < 2 + int(x[0]) % 5), y) for x, y in labelled(6, tokens=9)]
    net = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3))
    assert_equals_loop(make_private_trainer, Tagger(net), records)
