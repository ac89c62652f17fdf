"""Models and records that a wrong engine would be fooled by."""

from __future__ import annotations

import pytest
import torch
from random_modules import clipped, loop_over_records
from test_engines import engine_sum
from torch import Tensor, nn

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients import BookKeepingEngine
from lightning_dp.gradients.flat import FlatGradient


class Attention(nn.Module):
    """Parameters of its own, and a second argument that is the same for all records."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(positions, positions))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT + self.bias + mask, -1) @ x


class Masked(nn.Module):
    def __init__(self, positions: int) -> None:
        super().__init__()
        self.attention, self.head = Attention(positions), nn.Linear(4, 3)
        self.register_buffer("mask", torch.randn(positions, positions))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, self.mask).mean(1))


@pytest.mark.parametrize("records", [4, 5, 6])
def test_a_shared_argument_as_long_as_the_batch_is_no_list_of_records(records: int) -> None:
    module = Masked(positions=5).double()
    batch = torch.randn(records, 5, 4, dtype=torch.float64), torch.randint(3, (records,))
    engine = BookKeepingEngine(module)
    try:
        total, _ = engine_sum(engine, batch)
    except UnsupportedModelError:
        assert records == 5
    else:
        assert torch.allclose(total, clipped(loop_over_records(module, batch), 0.1), atol=1e-12)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.utils.checkpoint.checkpoint(self.body, x.requires_grad_(), use_reentrant=True)
        return self.head(x)


def test_a_reentrant_checkpoint_is_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        engine_sum(BookKeepingEngine(Reentrant()), (torch.randn(3, 4), torch.randint(3, (3,))))


@pytest.mark.parametrize("method", ["product", "gram", "twice", "rows"])
@pytest.mark.parametrize("scale", [1e-23, 1e-12, 1.0, 1e12])
def test_a_record_of_tiny_inputs_and_huge_gradients_is_clipped(method: str, scale: float) -> None:
    """The squares of either leave the range of float32, their product does not."""
    positions = 1 if method == "product" else 3
    layer = nn.Linear(2, 2, bias=False)
    x, y = scale * torch.randn(1, positions, 2), torch.randn(1, positions, 2) / scale

    def loss_of(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return (module(batch[0]) * batch[1]).sum() / len(batch[0])

    methods = {} if method == "product" else {"weight": method}
    total, _ = engine_sum(BookKeepingEngine(layer, methods=methods), (x, y), loss_of, max_norm=0.1)
    assert float(total.double().norm()) <= 0.1 * (1 + 1e-5)
    if scale != 1e-23:  # where squares underflow, the norm has a bound that is too large, never one that is too small
        assert float(total.double().norm()) >= 0.1 * (1 - 1e-5)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class UsesOwner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = Owner(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.own(x) + x.flip(1) * self.own.scale)


def test_a_use_outside_of_a_layer_without_a_rule_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"`own\.scale` is used outside"):
        engine_sum(BookKeepingEngine(UsesOwner()), (torch.randn(3, 4), torch.randint(3, (3,))))


def test_hooks_of_the_user_that_change_an_output_come_after_ours() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    module[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    total, _ = engine_sum(BookKeepingEngine(module), batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), 0.1), atol=1e-13)


class OneNumber(nn.Module):
    """Its own scale of a loss that it averages itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).square().mean()


def test_a_layer_that_puts_out_one_number_for_all_records_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), OneNumber())
    engine = BookKeepingEngine(model)
    engine.attach()
    loss = model(torch.randn(4, 3))
    engine.prepare(loss)
    with pytest.raises(UnsupportedModelError, match=r"`1` .OneNumber. .* one number for the whole batch"):
        engine.backward(loss)


def test_a_sum_for_parameters_of_another_type_does_not_fit() -> None:
    layer = nn.Linear(3, 2)
    flat = FlatGradient(dict(layer.named_parameters()))
    assert flat.fits(dict(layer.named_parameters()))
    assert not flat.fits(dict(layer.double().named_parameters()))


class SharesWithItsChild(nn.Module):
    """Reads a parameter that a child has under another name, and calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4, bias=False)
        self.table = self.child.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.child(x).tanh() + x @ self.table)


def test_a_parameter_that_a_layer_shares_with_its_child_is_counted_in_both() -> None:
    torch.manual_seed(0)
    module = SharesWithItsChild().double()
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    total, _ = engine_sum(BookKeepingEngine(module), batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), 0.1), atol=1e-13)


def test_a_layer_whose_forward_was_replaced_is_not_taken_for_what_it_was() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    layer = module[0]
    layer.forward = lambda x: nn.functional.linear(x, layer.weight.square(), layer.bias)
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    total, _ = engine_sum(BookKeepingEngine(module), batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), 0.1), atol=1e-13)


class Prompt(nn.Module):
    """Puts out its parameter itself, the same for all records."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.values


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.head = Prompt(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.prompt(x))


def test_a_parameter_that_a_layer_puts_out_itself_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"`prompt\.values` is used outside"):
        engine_sum(BookKeepingEngine(Prompted()), (torch.randn(3, 4), torch.randint(3, (3,))))


def test_a_forward_pass_that_was_forgotten_adds_nothing() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    engine = BookKeepingEngine(module)
    engine.attach()
    module(torch.randn(9, 4, dtype=torch.float64))
    engine.forget()
    total, _ = engine_sum(engine, batch)
    assert torch.allclose(total, clipped(loop_over_records(module, batch), 0.1), atol=1e-13)
