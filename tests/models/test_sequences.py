"""Recurrent layers and attention: Opacus' own are exact, torch's are refused with what replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SEQUENCES = labelled(4, 8)


class Recurrent(nn.Module):
    """The mean over what a recurrent layer puts out; where ``lengths`` says so, over the first steps only."""

    def __init__(self, kind: Callable[..., nn.Module], mode: str = "all", **settings: Any) -> None:
        super().__init__()
        self.recurrent = kind(8, 6, batch_first=True, **settings)
        self.head = nn.Linear(12 if settings.get("bidirectional") else 6, 3)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() * 3
        if self.mode == "packed":
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=4)
        else:
            out, _ = self.recurrent(x)
        if self.mode == "masked":
            out = out * (torch.arange(4) < lengths[:, None])[:, :, None]
        return self.head(out.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "deep"])
def test_recurrent_layers_of_opacus_equal_a_loop_over_records(
    kind: Callable[..., nn.Module], settings: dict[str, Any], make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, Classifier(Recurrent(kind, **settings)), SEQUENCES)


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU])
def test_padded_sequences_of_which_some_steps_count_equal_a_loop(
    kind: Callable[..., nn.Module], make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, Classifier(Recurrent(kind, "masked")), SEQUENCES)


@pytest.mark.parametrize("kind", [DPLSTM, DPGRU])
def test_packed_sequences_are_refused_with_the_remedy(
    kind: Callable[..., nn.Module], make_private_trainer: TrainerFactory
) -> None:
    module = Classifier(Recurrent(kind, "packed"))
    assert_refused(make_private_trainer, module, SEQUENCES, "`net.recurrent.", "pad sequences instead of packing")


class LanguageModel(nn.Module):
    """Embedding, recurrent layer, and the embedding again as a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(9, 6, padding_idx=0), DPLSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embed(ids))[0])  # type: ignore[no-any-return]


class NextToken(Classifier):
    """The mean over the real tokens of each record; over those of the whole batch if ``together``."""

    def __init__(self, net: nn.Module, together: bool = False) -> None:
        super().__init__(net)
        self.together = together

    def losses(self, batch: Any) -> Tensor:
        ids = batch[0]
        per_token = F.cross_entropy(self(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none", ignore_index=0)
        real = (ids[:, 1:] != 0).sum(1)
        if self.together:
            return per_token.sum(1) / real.sum() * len(ids)
        return per_token.sum(1) / real.clamp(min=1)


def test_a_recurrent_language_model_equals_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, NextToken(LanguageModel()), labelled(6, tokens=9))


def test_a_mean_over_the_tokens_of_a_padded_batch_is_refused(make_private_trainer: TrainerFactory) -> None:
    ids = [
        torch.where(torch.arange(6) < 3 + i % 4, x.clamp(min=1), 0) for i, (x, _) in enumerate(labelled(6, tokens=9))
    ]
    module = NextToken(LanguageModel(), together=True)
    assert_refused(make_private_trainer, module, [(x, 0) for x in ids], "depends on", "lightning_dp.per_record_mean")


class SelfAttention(nn.Module):
    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.attention, self.head, self.masked = DPMultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3), masked

    def forward(self, x: Tensor) -> Tensor:
        padding = (x[:, :, 0] > 1) if self.masked else None
        return self.head(self.attention(x, x, x, key_padding_mask=padding)[0].mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_opacus_equals_a_loop_over_records(masked: bool, make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, Classifier(SelfAttention(masked)), SEQUENCES)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LSTM": (lambda: Recurrent(nn.LSTM), "net.recurrent"),
    "GRU": (lambda: Recurrent(nn.GRU), "net.recurrent"),
    "RNN": (lambda: Recurrent(nn.RNN), "net.recurrent"),
    "TransformerEncoderLayer": (Encoder, "net.layer.self_attn"),
}


@pytest.mark.parametrize(("make_net", "path"), REFUSED.values(), ids=REFUSED.keys())
def test_layers_that_compute_on_their_parameters_in_one_go_are_refused_with_what_replaces_them(
    make_net: Callable[[], nn.Module], path: str, make_private_trainer: TrainerFactory
) -> None:
    parts = f"of module `{path}`", f"Let `PrivateStrategy(replace_unsupported=True)` replace `{path}`"
    assert_refused(make_private_trainer, Classifier(make_net()), SEQUENCES, *parts)
