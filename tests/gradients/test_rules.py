"""Each clipping rule against a loop over records, in both engines, and what one record can add at most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_modules import cross_entropy, loop_over_records, random_case
from torch import Tensor, nn

import lightning_dp as ldp
from lightning_dp import errors
from lightning_dp.gradients import (
    BookKeepingEngine,
    Clipping,
    ClippingRule,
    FlatGradient,
    GradientEngine,
    HookEngine,
    clipped_sum,
)

MAX_NORM = 0.3

Rows = Mapping[str, Tensor]


def norm(gradient: Rows) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradient.values()))


def by_layer(gradient: Rows) -> dict[str, dict[str, Tensor]]:
    layers: dict[str, dict[str, Tensor]] = {}
    for name, g in gradient.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = g
    return layers


def flat(gradient: Rows) -> dict[str, Tensor]:
    return {name: g * min(1.0, MAX_NORM / norm(gradient)) for name, g in gradient.items()}


def automatic(gradient: Rows) -> dict[str, Tensor]:
    return {name: g * MAX_NORM / (norm(gradient) + 0.01) for name, g in gradient.items()}


def per_layer(gradient: Rows) -> dict[str, Tensor]:
    layers = by_layer(gradient)
    bound = MAX_NORM / math.sqrt(len(layers))
    return {
        name: g * (min(1.0, bound / norm(layer)) if norm(layer) else 1.0)
        for layer in layers.values()
        for name, g in layer.items()
    }


RULES: dict[str, tuple[ClippingRule, Callable[[Rows], dict[str, Tensor]]]] = {
    "flat": (ldp.FlatClipping(), flat),
    "automatic": (ldp.AutomaticClipping(), automatic),
    "per layer": (ldp.PerLayerClipping(), per_layer),
    "adaptive": (ldp.AdaptiveClipping(), flat),
}


def named_loop(module: nn.Module, batch: tuple[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    """The gradient of each record alone, by name of the parameter."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return [
        {
            name: piece.view(p.shape)
            for (name, p), piece in zip(trained.items(), row.split([p.numel() for p in trained.values()]), strict=True)
        }
        for row in loop_over_records(module, batch)
    ]


def engine_sum(engine: GradientEngine, batch: tuple[Tensor, Tensor], rule: ClippingRule) -> dict[str, Tensor]:
    engine.attach()
    loss = cross_entropy(engine.module, batch)
    engine.prepare(loss)
    engine.backward(loss)
    total = FlatGradient(engine.parameters)
    engine.add_clipped(total, len(batch[0]), Clipping(rule, MAX_NORM))
    engine.detach()
    return total.views


every_rule = pytest.mark.parametrize(("rule", "clip"), RULES.values(), ids=RULES.keys())


@every_rule
@pytest.mark.parametrize("seed", range(12))
def test_the_engine_equals_a_loop_over_records(
    seed: int, rule: ClippingRule, clip: Callable[[Rows], dict[str, Tensor]]
) -> None:
    module, batch = random_case(seed, records=5)
    found = engine_sum(BookKeepingEngine(module), batch, rule)
    clipped = [clip(row) for row in named_loop(module, batch)]
    for name, total in found.items():
        assert torch.allclose(total, sum(row[name] for row in clipped), atol=1e-12)


@every_rule
def test_the_plain_engine_equals_a_loop_over_records(
    rule: ClippingRule, clip: Callable[[Rows], dict[str, Tensor]]
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = torch.randn(5, 6, dtype=torch.float64), torch.randint(3, (5,))
    found = engine_sum(HookEngine(module), batch, rule)
    clipped = [clip(row) for row in named_loop(module, batch)]
    for name, total in found.items():
        assert torch.allclose(total, sum(row[name] for row in clipped), atol=1e-12)


@every_rule
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-15, 1e-3, 1.0, 1e3, 1e15]), bad=st.booleans())
def test_a_record_adds_at_most_the_sensitivity_side_number_included(
    rule: ClippingRule, clip: object, seed: int, scale: float, bad: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = {f"{layer}.{leaf}": scale * torch.randn(4, 3, 2, generator=generator) for layer in "abc" for leaf in "wv"}
    if bad:
        rows["b.w"][0, 1] = float("nan")
    clipping = Clipping(rule, MAX_NORM)
    whole, norms = clipped_sum(rows, clipping)
    rest, others = clipped_sum({name: row[1:] for name, row in rows.items()}, clipping)
    moved = [norm({name: whole[name] - rest[name] for name in whole})]
    if rule.is_adaptive:
        moved.append(float(clipping.side_sum(norms) - clipping.side_sum(others)))
    assert math.hypot(*moved) <= clipping.sensitivity * (1 + 1e-5)
    if bad:
        assert math.hypot(*moved) < 1e-6


def test_the_bounds_of_layers_add_up_as_squares_do_and_follow_the_longest_path() -> None:
    rule = ldp.PerLayerClipping(weights={"body": 2.0, "body.head": 3.0})
    names = ["stem.weight", "stem.bias", "body.conv.weight", "body.head.weight", "bodyguard.weight"]
    bounds = rule.bounds(0.7, dict.fromkeys(rule.groups(names).values()))
    assert bounds == pytest.approx([0.7 * w / math.sqrt(1 + 4 + 9 + 1) for w in (1, 2, 3, 1)])
    assert math.hypot(*bounds) == pytest.approx(0.7)


def test_a_layer_that_takes_no_part_keeps_its_share_of_the_bound() -> None:
    rows = {"a.weight": torch.full((1, 4), 10.0)}
    sums, _ = clipped_sum(rows, Clipping(ldp.PerLayerClipping(), 1.0), ["a.weight", "b.weight"])
    assert norm(sums) == pytest.approx(1 / math.sqrt(2))


def test_the_clip_norm_moves_by_the_published_formula() -> None:
    rule = ldp.AdaptiveClipping(quantile=0.7, learning_rate=0.3, count_share=0.04)
    clipping = Clipping(rule, 2.0)
    norms = torch.tensor([0.5, 1.5, 2.0, 2.5, 9.0, float("inf")])
    # Three of five are not clipped and one is dropped; as many records were expected.
    moved = clipping.after(float(clipping.side_sum(norms)) / 5)
    assert moved.max_norm == pytest.approx(2.0 * math.exp(-0.3 * (3 / 5 - 0.7)))


def test_the_count_is_as_noisy_as_documented() -> None:
    """Noise of the whole on one record's half: the standard deviation in records is z / (2 sqrt(share))."""
    rule = ldp.AdaptiveClipping(count_share=0.01)
    clipping = Clipping(rule, 0.3)
    half = float(clipping.side_sum(torch.tensor([0.1])))
    assert clipping.sensitivity == pytest.approx(math.hypot(0.3, half))
    assert 0.5 * clipping.sensitivity / half == pytest.approx(0.5 / math.sqrt(0.01))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ldp.AutomaticClipping(stability=0.0), "stability"),
        (lambda: ldp.AdaptiveClipping(quantile=1.0), "quantile"),
        (lambda: ldp.AdaptiveClipping(count_share=0.0), "count_share"),
        (lambda: ldp.AdaptiveClipping(learning_rate=-1.0), "learning_rate"),
        (lambda: ldp.PerLayerClipping(weights={"net": 0.0}), "weights"),
        (lambda: ldp.PerLayerClipping(weights=[1.0]), "weights"),  # type: ignore[arg-type]
        (lambda: ldp.PrivateStrategy(clipping=0.5), "clipping"),  # type: ignore[arg-type]
    ],
)
def test_settings_out_of_range_are_refused_by_name(make: Callable[[], object], name: str) -> None:
    with pytest.raises(errors.InvalidValueError, match=name):
        make()
