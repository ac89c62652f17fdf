"""Both engines against a loop over records, on random modules; and how far one record can move the sum."""

from __future__ import annotations

import copy

import pytest
import torch
from random_modules import clipped, cross_entropy, loop_over_records, random_case
from torch import Tensor, nn

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients import BookKeepingEngine, Clipping, FlatClipping, FlatGradient, GradientEngine, HookEngine

MAX_NORM = 0.1


def engine_sum(
    engine: GradientEngine, batch: tuple[Tensor, ...], loss_of=cross_entropy, max_norm: float = MAX_NORM, repeats=1
) -> tuple[Tensor, Tensor]:
    """The clipped sum as a vector, and the norms; the last of some steps, for the first one chooses methods."""
    if not engine.is_attached:
        engine.attach()
    for _ in range(repeats):
        loss = loss_of(engine.module, batch)
        engine.check_inputs(len(batch[0]))
        engine.prepare(loss)
        engine.backward(loss)
        total = FlatGradient(engine.parameters)
        norms = engine.add_clipped(total, len(batch[0]), Clipping(FlatClipping(), max_norm))
    return total.vector, norms


@pytest.mark.parametrize("seed", range(60))
def test_book_keeping_equals_a_loop_over_records(seed: int) -> None:
    module, batch = random_case(seed, records=1 + seed % 6)
    rows = loop_over_records(module, batch)
    for memory in ("speed", "low"):
        engine = BookKeepingEngine(module, memory=memory)
        total, norms = engine_sum(engine, batch, repeats=2)
        engine.detach()
        expected = clipped(rows, MAX_NORM)
        assert float((total - expected).norm()) <= 1e-12 * max(1.0, float(expected.norm()))
        assert torch.allclose(norms, torch.stack([row.norm() for row in rows]), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("seed", range(60, 90))
def test_float32_is_as_exact_as_float32_can_be(seed: int) -> None:
    module, (x, y) = random_case(seed, records=5)
    expected = clipped(loop_over_records(module, (x, y)), MAX_NORM)
    module = module.float()
    total, _ = engine_sum(BookKeepingEngine(module), (x.float() if x.is_floating_point() else x, y), repeats=2)
    assert float((total.double() - expected).norm()) <= 1e-5 * float(expected.norm())


IMAGES = [seed for seed in range(90, 110) if random_case(seed, 1)[1][0].is_floating_point()]


@pytest.mark.parametrize("seed", IMAGES)
def test_a_record_that_is_not_finite_is_dropped_and_no_other(seed: int) -> None:
    module, (x, y) = random_case(seed, records=5)
    x[1], x[3, 0] = float("nan"), float("inf")
    others = [0, 2, 4]
    expected = clipped(loop_over_records(module, (x[others], y[others])), MAX_NORM)
    total, norms = engine_sum(BookKeepingEngine(module), (x, y), repeats=2)
    assert not torch.isfinite(norms[[1, 3]]).any()
    assert float((total - expected).norm()) <= 1e-12


@pytest.mark.parametrize("seed", range(100, 120))
def test_neighbours_move_the_sum_by_at_most_the_clip_norm(seed: int) -> None:
    """50 neighbours of each of 20 modules, in float32."""
    module, (x, y) = random_case(seed, records=6)
    module, x = module.float(), x.float() if x.is_floating_point() else x
    engine = BookKeepingEngine(module)
    generator = torch.Generator().manual_seed(seed)
    for attempt in range(50):
        size = 1 + attempt % 6
        chosen = torch.randperm(6, generator=generator)[:size]
        scale = 10.0 ** float(torch.randint(-2, 4, (), generator=generator))

        def loss_of(module: nn.Module, batch: tuple[Tensor, ...], scale: float = scale) -> Tensor:
            return scale * cross_entropy(module, batch)

        whole, _ = engine_sum(engine, (x[chosen], y[chosen]), loss_of)
        rest = torch.zeros_like(whole)
        if size > 1:
            rest, _ = engine_sum(engine, (x[chosen[1:]], y[chosen[1:]]), loss_of)
        assert float((whole.double() - rest.double()).norm()) <= MAX_NORM * (1 + 1e-5)
    engine.detach()


def test_engines_agree() -> None:
    layers = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    module = nn.Sequential(*layers)
    batch = torch.randn(6, 1, 6, 6), torch.randint(3, (6,))
    ours, norms = engine_sum(BookKeepingEngine(module), batch, repeats=2)
    other = HookEngine(module)
    theirs, other_norms = engine_sum(other, batch)
    other.detach()
    assert torch.allclose(ours, theirs, atol=1e-7)
    assert torch.allclose(norms, other_norms, rtol=1e-5)


@pytest.mark.parametrize("method", ["gram", "rows", "twice"])
def test_a_pinned_method_is_used_and_changes_nothing(method: str) -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(35, 3)).double()
    batch = torch.randn(6, 7, 4, dtype=torch.float64), torch.randint(3, (6,))
    total, _ = engine_sum(BookKeepingEngine(module, methods={"0.weight": method}), batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), MAX_NORM), atol=1e-14)


def test_a_pinned_method_that_a_size_does_not_have_gives_way_to_another() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    total, _ = engine_sum(BookKeepingEngine(module, methods={"0.weight": "gram"}), batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), MAX_NORM), atol=1e-14)


def test_a_gram_sum_whose_terms_cancel_is_computed_again() -> None:
    """Positions whose output gradients cancel: the Gram sum alone would put the norm far below the true one."""
    layer = nn.Linear(3, 3, bias=False)
    a = 1e3 * torch.ones(2, 64, 3) + torch.randn(2, 64, 3)
    b = torch.randn(2, 64, 3)
    b -= b.mean(1, keepdim=True)

    def loss_of(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (module(batch[0]) * batch[1]).sum() / len(batch[0])

    rows = loop_over_records(copy.deepcopy(layer).double(), (a.double(), b.double()), loss_of)
    _, norms = engine_sum(BookKeepingEngine(layer, methods={"weight": "gram"}), (a, b), loss_of)
    expected = torch.stack([row.norm() for row in rows]).float()
    assert torch.allclose(norms, expected, rtol=1e-5)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x) + nn.functional.linear(x, self.layer.weight))


def test_a_functional_use_is_refused_by_name() -> None:
    engine = BookKeepingEngine(Functional())
    with pytest.raises(UnsupportedModelError, match=r"`layer\.weight` is used outside the forward of module `layer`"):
        engine_sum(engine, (torch.randn(2, 4), torch.zeros(2, dtype=torch.long)))


class SharedTransposed(nn.Module):
    """A use that only appears for some inputs, after any check before training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if bool((x > 1e3).any()):
            x = x @ self.layer.weight
        return self.head(x)


def test_a_functional_use_is_seen_in_the_step_in_which_it_happens() -> None:
    engine = BookKeepingEngine(SharedTransposed())
    y = torch.zeros(2, dtype=torch.long)
    engine_sum(engine, (torch.randn(2, 4), y))
    with pytest.raises(UnsupportedModelError, match="is used outside the forward"):
        engine_sum(engine, (1e6 * torch.randn(2, 4), y))


def test_an_input_that_is_overwritten_later_is_refused() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            x += 1  # no plain gradient of the weight either, once autograd needs it
            return self.head(y + x)

    engine = BookKeepingEngine(Overwrites())
    with pytest.raises(UnsupportedModelError, match=r"input of `layer` \(Linear\) was changed in place"):
        engine_sum(engine, (torch.randn(2, 4), torch.zeros(2, dtype=torch.long)))


def test_hooks_on_outputs_that_change_the_gradient_come_first() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            y.register_hook(lambda gradient: -3 * gradient)
            removed = y.register_hook(lambda gradient: 100 * gradient)
            removed.remove()
            return self.head(y.tanh())

    module, batch = Scales().double(), (torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 3)
    total, _ = engine_sum(BookKeepingEngine(module), batch, repeats=2)
    expected = clipped(loop_over_records(module, batch), MAX_NORM)
    assert float((total - expected).norm()) <= 1e-12


def test_no_weight_gets_a_gradient() -> None:
    module, batch = random_case(3, records=4)
    engine = BookKeepingEngine(module)
    engine.attach()
    loss = cross_entropy(module, batch)
    engine.prepare(loss)
    engine.backward(loss)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_nothing_is_left_after_detaching() -> None:
    module, batch = random_case(5, records=4)
    before = {name: set(vars(layer)) for name, layer in module.named_modules()}
    engine = BookKeepingEngine(module)
    engine_sum(engine, batch)
    engine.detach()
    assert {name: set(vars(layer)) for name, layer in module.named_modules()} == before
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize("reentrant", [False])
def test_checkpointed_layers_are_counted_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=reentrant))

    module = Checkpointed().double()
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    total, _ = engine_sum(BookKeepingEngine(module), batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), MAX_NORM), atol=1e-14)


@pytest.mark.parametrize("allowed", ["highest", "high", "medium"])
def test_norms_and_sums_keep_full_precision_and_the_users_choice_comes_back(allowed: str) -> None:
    """Reduced products would make a norm that does not bound the sum."""
    module, (x, y) = random_case(7, records=5)
    expected = clipped(loop_over_records(module, (x, y)), MAX_NORM)
    module = module.float()
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()

    class Watched(FlatClipping):
        def factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return super().factors(norms, bounds)

    torch.set_float32_matmul_precision(allowed)
    try:
        engine = BookKeepingEngine(module)
        engine.attach()
        loss = cross_entropy(module, (x.float() if x.is_floating_point() else x, y))
        engine.prepare(loss)
        engine.backward(loss)
        total = FlatGradient(engine.parameters)
        engine.add_clipped(total, 5, Clipping(Watched(), MAX_NORM))
        assert torch.get_float32_matmul_precision() == allowed
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]
    if allowed == "highest":
        assert float((total.vector.double() - expected).norm()) <= 1e-5 * float(expected.norm())


def test_memory_is_kept_to_what_was_allowed() -> None:
    """Wide layers at few positions: rows are fastest and largest, and only ``speed`` may keep them."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Flatten(), nn.Linear(64 * 2, 3))
    batch = torch.randn(8, 2, 64), torch.randint(3, (8,))
    rows = 8 * 64 * 64 * 4
    held = {}
    for memory in ("low", rows + 2 * 8 * 2 * 128 * 4, "speed"):
        engine = BookKeepingEngine(module, memory=memory)
        engine.attach()
        loss = cross_entropy(module, batch)
        engine.prepare(loss)
        engine.backward(loss)
        uses = {name: found[0] for name, found in engine._step.waiting.items()}
        engine.add_clipped(FlatGradient(engine.parameters), 8, Clipping(FlatClipping(), MAX_NORM))
        held[memory] = sum(engine.choice.method(name, use) == "rows" for name, use in uses.items())
        engine.detach()
    assert held["low"] == 0
    assert held[rows + 2 * 8 * 2 * 128 * 4] <= 1
