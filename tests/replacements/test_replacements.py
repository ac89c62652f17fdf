"""Replacements compute what the originals compute, and are saved as they are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lightning_dp as ldp
from lightning_dp import errors
from lightning_dp.replacements import GroupNormForBatchNorm, SeparableAttention, SeparableRecurrence


def flat(value: Any) -> list[Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, Tensor) else [x for part in value for x in flat(part)]


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def gradients(outputs: Any, parameters: list[Tensor]) -> list[Tensor]:
    """Gradients of a function of all outputs."""
    torch.manual_seed(9)
    return list(
        torch.autograd.grad(sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in flat(outputs)), parameters)
    )


RECURRENT = [
    (kind, layers, bidirectional, bias, batch_first)
    for kind in ("LSTM", "LSTM with projection", "GRU", "tanh", "relu")
    for layers, bidirectional, bias, batch_first in [
        (1, False, True, True),
        (2, True, True, False),
        (2, True, False, True),
    ]
]


def recurrent(kind: str, **settings: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    makers = {
        "LSTM": lambda: nn.LSTM(3, 5, **settings),
        "LSTM with projection": lambda: nn.LSTM(3, 5, proj_size=2, **settings),
        "GRU": lambda: nn.GRU(3, 5, **settings),
    }
    layer = makers[kind]() if kind in makers else nn.RNN(3, 5, nonlinearity=kind, **settings)
    return layer.double()


def first_states(layer: nn.RNNBase, records: int) -> Any:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(count, records, layer.proj_size or layer.hidden_size, dtype=torch.float64)
    if layer.mode != "LSTM":
        return hidden
    return hidden, torch.randn(count, records, layer.hidden_size, dtype=torch.float64)


@pytest.mark.parametrize("given", [False, True], ids=["from zeros", "from states"])
@pytest.mark.parametrize(("kind", "layers", "bidirectional", "bias", "batch_first"), RECURRENT)
def test_a_recurrent_layer_computes_the_same(
    kind: str, layers: int, bidirectional: bool, bias: bool, batch_first: bool, given: bool
) -> None:
    settings = {"num_layers": layers, "bidirectional": bidirectional, "bias": bias, "batch_first": batch_first}
    original = recurrent(kind, **settings)
    made = SeparableRecurrence(recurrent(kind, **settings))
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    hx = first_states(original, 4 if batch_first else 6) if given else None
    expected, found = original(x, hx), made(x, hx)
    assert_same(found, expected)
    saved = made.state_dict(keep_vars=True)
    assert set(saved) == set(dict(original.named_parameters()))
    names = list(saved)
    assert_same(
        gradients(found, [saved[name] for name in names]),
        gradients(expected, [getattr(original, name) for name in names]),
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_padded_positions_of_packed_sequences_take_no_part(kind: str) -> None:
    original = recurrent(kind, num_layers=2, bidirectional=True, batch_first=True)
    made = SeparableRecurrence(original)
    x, lengths = torch.randn(4, 6, 3, dtype=torch.float64), torch.tensor([3, 6, 1, 5])
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    (expected, last), (found, last_found) = original(packed), made(packed)
    assert_same(last_found, last)
    assert_same(pad_packed_sequence(found)[0], pad_packed_sequence(expected)[0])
    assert_same(tuple(found)[:2], tuple(expected)[:2])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_one_sequence_without_a_batch_dimension(kind: str) -> None:
    original = recurrent(kind, num_layers=2)
    assert_same(SeparableRecurrence(original)(torch.ones(6, 3).double()), original(torch.ones(6, 3).double()))


def test_dropout_is_between_layers_only() -> None:
    """With next to all dropped, the second layer sees zeros, and nothing of its own output is dropped."""
    made = SeparableRecurrence(recurrent("GRU", num_layers=2, dropout=1 - 1e-9))
    output, _ = made(torch.randn(6, 4, 3, dtype=torch.float64))
    assert bool((output != 0).all())
    assert_same(output[:, 0], output[:, 1])
    made.eval()
    again, _ = made(torch.randn(6, 4, 3, dtype=torch.float64))
    assert not torch.allclose(again[:, 0], again[:, 1])


SEPARATE = [{"kdim": 5, "vdim": 7}]
SIZES = [{}, *SEPARATE, {"bias": False}, {"add_zero_attn": True}]
MASKS = ["none", "causal", "padding", "each head", "numbers and padding"]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("settings", SIZES, ids=str)
@pytest.mark.parametrize("masks", MASKS)
def test_attention_computes_the_same(settings: dict[str, Any], masks: str, batch_first: bool) -> None:
    torch.manual_seed(1)
    original = nn.MultiheadAttention(6, 2, batch_first=batch_first, **settings).double()
    made = SeparableAttention(original)
    query = torch.randn(3, 4, 6, dtype=torch.float64)
    key = torch.randn(3, 5, settings.get("kdim", 6), dtype=torch.float64)
    value = torch.randn(3, 5, settings.get("vdim", 6), dtype=torch.float64)
    given: dict[str, Tensor] = {}
    if masks == "causal":
        given["attn_mask"] = torch.ones(4, 5, dtype=torch.bool).triu(2)
    if masks == "each head":
        given["attn_mask"] = torch.randn(6, 4, 5, dtype=torch.float64)
    if masks == "numbers and padding":
        given["attn_mask"] = torch.randn(4, 5, dtype=torch.float64)
    if "padding" in masks:
        padding = torch.arange(5)[None] >= torch.tensor([5, 2, 3])[:, None]
        given["key_padding_mask"] = (
            padding if masks == "padding" else torch.zeros(3, 5).double().masked_fill(padding, -1e30)
        )
    inputs = [x if batch_first else x.transpose(0, 1) for x in (query, key, value)]
    for average, need_weights in itertools.product([True, False], [True, False]):
        call = {**given, "average_attn_weights": average, "need_weights": need_weights}
        assert_same(made(*inputs, **call), original(*inputs, **call))
    assert set(made.state_dict()) == set(original.state_dict())
    if settings in SEPARATE:
        wanted = [original.q_proj_weight, original.k_proj_weight, original.v_proj_weight]
    else:
        wanted = [original.in_proj_weight]
    expected = gradients(original(*inputs, **given), wanted)
    found = gradients(made(*inputs, **given), [made.q.weight, made.k.weight, made.v.weight])
    assert_same(found if settings in SEPARATE else torch.cat(found), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_encoder_computes_the_same(norm_first: bool, training: bool) -> None:
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    original = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().train(training)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    padding = torch.arange(5)[None] >= torch.tensor([5, 2, 3])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    calls = [{}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}]
    with torch.no_grad():
        expected = [original(x, **call) for call in calls]
        kept = original.state_dict()
        replaced = ldp.replace_unsupported(original.train())
        original.train(training)
        found = [original(x, **call) for call in calls]
    assert replaced == {f"layers.{i}.self_attn": "MultiheadAttention" for i in range(2)}
    for a, b in zip(found, expected, strict=True):
        real = ~padding
        torch.testing.assert_close(a[real], b[real], rtol=1e-9, atol=1e-10)
    assert_same(list(original.state_dict().values()), [kept[name] for name in original.state_dict()])


def model() -> nn.Module:
    torch.manual_seed(3)
    parts = {
        "convolution": nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)),
        "flat": nn.BatchNorm1d(6),
        "lstm": nn.LSTM(3, 5, num_layers=2, bidirectional=True),
        "gru": nn.GRU(3, 5),
        "attention": nn.MultiheadAttention(6, 2),
        "mixed": nn.MultiheadAttention(6, 2, kdim=4, vdim=4, bias=False),
    }
    return nn.ModuleDict(parts)


def test_weights_load_from_the_original_into_its_replacement_and_back() -> None:
    original, replaced, fresh = model(), model(), model()
    assert set(ldp.replace_unsupported(replaced)) == {
        "convolution.1",
        "flat",
        "lstm",
        "gru",
        "attention",
        "mixed",
    }
    for parameter in original.parameters():
        nn.init.normal_(parameter)
    replaced.load_state_dict(original.state_dict())
    fresh.load_state_dict(replaced.state_dict())
    for name, value in original.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name


def test_a_group_of_channels_never_holds_a_single_number() -> None:
    for channels in (1, 3, 6, 8, 16, 20, 64, 512, 1000):
        norm = GroupNormForBatchNorm(nn.BatchNorm2d(channels))
        assert channels % norm.num_groups == 0
        assert channels // norm.num_groups >= min(4, channels)
        flat_norm = GroupNormForBatchNorm(nn.BatchNorm1d(channels))
        assert channels == 1 or bool(flat_norm(torch.randn(2, channels)).any())


def test_a_layer_that_stands_in_two_places_stays_one_layer() -> None:
    shared = nn.GRU(3, 3)
    module = nn.ModuleDict({"a": shared, "b": shared})
    assert ldp.replace_unsupported(module) == {"a": "GRU"}
    assert module["a"] is module["b"]


def test_frozen_layers_in_eval_mode_and_subclasses_are_left_alone() -> None:
    class OwnLstm(nn.LSTM):
        pass

    module = nn.ModuleDict({"frozen": nn.BatchNorm2d(4).requires_grad_(False).eval(), "own": OwnLstm(3, 3)})
    assert ldp.replace_unsupported(module) == {}


def test_frozen_parts_stay_frozen_and_the_mode_stays() -> None:
    module = nn.ModuleDict({"attention": nn.MultiheadAttention(6, 2), "norm": nn.BatchNorm2d(8).eval()})
    module["attention"].in_proj_weight.requires_grad_(False)
    ldp.replace_unsupported(module)
    assert not module["attention"].q.weight.requires_grad
    assert module["attention"].q.bias.requires_grad
    assert not module["norm"].training


def test_what_has_no_replacement_is_refused_by_name() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="add_bias_kv"):
        ldp.replace_unsupported(nn.Sequential(nn.MultiheadAttention(6, 2, add_bias_kv=True)))
    module = nn.Sequential(nn.MultiheadAttention(6, 2), nn.MultiheadAttention(6, 2))
    module[1].in_proj_weight = module[0].in_proj_weight
    with pytest.raises(errors.UnsupportedModelError, match=r"`0\.in_proj_weight` is shared"):
        ldp.replace_unsupported(module)
