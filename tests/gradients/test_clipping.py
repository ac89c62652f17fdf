"""Clipped sums against a loop over records, and their sensitivity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dp.gradients import Clipping, FlatClipping, clipped_sum, record_norms

SHAPES = [(3, 4), (5,), (2, 1, 2)]


Rows = dict[str, torch.Tensor]


def make_rows(records: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"layer{i}.weight": shape for i, shape in enumerate(SHAPES)}
    return {
        name: scale * torch.randn(records, *shape, generator=generator, dtype=dtype) for name, shape in shapes.items()
    }


@settings(max_examples=50, deadline=None)
@given(records=st.integers(1, 8), seed=st.integers(0, 10**6), max_norm=st.floats(1e-3, 1e3))
def test_the_sum_equals_a_loop_over_records(records: int, seed: int, max_norm: float) -> None:
    rows = make_rows(records, seed)
    sums, norms = clipped_sum(rows, Clipping(FlatClipping(), max_norm))
    expected = {name: torch.zeros(row.shape[1:], dtype=torch.float64) for name, row in rows.items()}
    for i in range(records):
        norm = sum(float((row[i] ** 2).sum()) for row in rows.values()) ** 0.5
        assert float(norms[i]) == pytest.approx(norm, rel=1e-12)
        for name, row in rows.items():
            expected[name] += row[i] * min(1.0, max_norm / norm)
    for name, value in sums.items():
        assert torch.allclose(value, expected[name], rtol=1e-12, atol=1e-14)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e3, 1e15]), max_norm=st.floats(1e-3, 1e3))
def test_removing_a_record_moves_the_sum_by_at_most_the_clip_norm(seed: int, scale: float, max_norm: float) -> None:
    rows = make_rows(6, seed, scale, dtype=torch.float32)
    whole, _ = clipped_sum(rows, Clipping(FlatClipping(), max_norm))
    rest, _ = clipped_sum({name: row[1:] for name, row in rows.items()}, Clipping(FlatClipping(), max_norm))
    moved = record_norms([(value - rest[name])[None].double() for name, value in whole.items()])
    assert float(moved) <= max_norm * (1 + 1e-5) + 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_record_whose_norm_is_not_finite_is_dropped_and_no_other(bad: float) -> None:
    rows = make_rows(4, seed=0, dtype=torch.float32)
    rows["layer1.weight"][2, 3] = bad
    sums, norms = clipped_sum(rows, Clipping(FlatClipping(), 1.0))
    rest = {name: torch.cat([row[:2], row[3:]]) for name, row in rows.items()}
    others, _ = clipped_sum(rest, Clipping(FlatClipping(), 1.0))
    assert not torch.isfinite(norms[2])
    for name, value in sums.items():
        assert torch.allclose(value, others[name], atol=1e-6)


def test_a_zero_gradient_stays_zero() -> None:
    sums, norms = clipped_sum({"bias": torch.zeros(3, 2)}, Clipping(FlatClipping(), 1.0))
    assert sums["bias"].tolist() == [0, 0]
    assert norms.tolist() == [0, 0, 0]
