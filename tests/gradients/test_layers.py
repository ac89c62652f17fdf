"""Rules of layers against a loop that differentiates one record at a time."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.errors import UnsupportedModelError
from lightning_dp.gradients.layers import LayerForward, Rows, Use, Workspace, known_gradients
from lightning_dp.gradients.layers.tied import TiedHead

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
Case = tuple[nn.Module, tuple[Any, ...], Callable[[int], tuple[Any, ...]]]


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def by_record(layer: nn.Module, of_record: Callable[[int], tuple[Any, ...]], gradient: Tensor) -> dict[str, Tensor]:
    """The gradient of each record by one backward pass each, ``(records, *shape)``."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    rows: list[list[Tensor]] = []
    for i in range(len(gradient)):
        # With gradients of inputs, for torch 2.13 crashes in some group norms that shall give those of weights only.
        inputs = [x.clone().requires_grad_() if _is_float(x) else x for x in of_record(i)]
        leaves = [*parameters, *filter(_is_float, inputs)]
        with torch.enable_grad():
            found = torch.autograd.grad(layer(*inputs), leaves, gradient[i : i + 1].contiguous(), allow_unused=True)
        found = found[: len(parameters)]
        dense = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        rows.append([g.to_dense() if g.is_sparse else g for g in dense])
    return {
        name: torch.stack([row[j] for row in rows]) if rows else torch.zeros(0, *p.shape, dtype=p.dtype)
        for j, (name, p) in enumerate(zip(names, parameters, strict=True))
    }


def uses_of(layer: nn.Module, inputs: Sequence[Any], gradient: Tensor, wanted: Sequence[str] = ()) -> dict[str, Use]:
    names = frozenset(wanted or dict(layer.named_parameters()))
    rule = known_gradients(layer)
    assert rule is not None
    with torch.no_grad():
        return rule(LayerForward(layer, inputs, gradient, names, "layer"))


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.numel():
        torch.testing.assert_close(
            found, expected, rtol=TOLERANCE[found.dtype], atol=TOLERANCE[found.dtype] * float(expected.abs().max())
        )


@torch.no_grad()
def assert_exact(use: Use, expected: Tensor) -> None:
    """Every way to the norms, and the sum and rows of what each leaves, against rows that were computed otherwise."""
    workspace = Workspace()
    weights = torch.rand(len(expected), dtype=expected.dtype)
    squares = expected.flatten(1).square().sum(1)
    kept = torch.arange(len(expected)) % 2 == 0
    for method in use.methods:
        for _ in range(2):  # the second run uses memory that holds the first one's results
            found, rest = use.start(method, workspace)
        assert_near(found, squares)
        for form in (use, rest):
            assert_near(form.rows(), expected)
            total = torch.ones(use.shape, dtype=expected.dtype)
            form.add_to(total, weights, Workspace())
            assert_near(total, 1 + torch.tensordot(weights, expected, 1))
            part = form.only(kept)
            assert_near(part.rows(), expected * kept.view(-1, *[1] * len(use.shape)))
            total = torch.zeros(use.shape, dtype=expected.dtype)
            part.add_to(total, weights, Workspace())
            assert_near(total, torch.tensordot(weights * kept, expected, 1))


def assert_layer(layer: nn.Module, inputs: Sequence[Any], of_record: Callable[[int], tuple[Any, ...]]) -> None:
    gradient = torch.randn_like(layer(*inputs).detach())
    expected = by_record(layer, of_record, gradient)
    found = uses_of(layer, inputs, gradient)
    assert found.keys() == expected.keys()
    for name, use in found.items():
        assert_exact(use, expected[name])
        assert uses_of(layer, inputs, gradient, [name]).keys() == {name}


def simple(layer: nn.Module, x: Tensor) -> Case:
    return layer, (x,), lambda i: (x[i : i + 1].contiguous(),)


# -- random layers ---------------------------------------------------------------------------------------------------


def random_linear(draw: random.Random, dtype: torch.dtype) -> Case:
    layer = nn.Linear(draw.randint(1, 6), draw.randint(1, 6), bias=draw.random() < 0.7, dtype=dtype)
    middle = [draw.randint(1, 5) for _ in range(draw.randint(0, 2))]
    return simple(layer, torch.randn(draw.randint(0, 5), *middle, layer.in_features, dtype=dtype))


def random_convolution(draw: random.Random, dtype: torch.dtype) -> Case:
    dims, groups = draw.randint(1, 3), draw.choice([1, 1, 2, 3])
    kernel = [draw.randint(1, 3) for _ in range(dims)]
    mode = draw.choice(["zeros", "zeros", "reflect", "replicate", "circular"])
    padding = draw.choice(["same", "valid", "ints", "ints"])
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * draw.randint(1, 3),
        groups * draw.randint(1, 3),
        kernel,
        stride=[1 if padding == "same" else draw.randint(1, 3) for _ in range(dims)],
        padding=[draw.randint(0, 2) for _ in range(dims)] if padding == "ints" else padding,
        dilation=[draw.randint(1, 2) for _ in range(dims)],
        groups=groups,
        bias=draw.random() < 0.7,
        padding_mode=mode,
        dtype=dtype,
    )
    extent = [draw.randint(6, 10) if dims < 3 else draw.randint(5, 6) for _ in range(dims)]
    x = torch.randn(draw.randint(1, 5), layer.in_channels, *extent, dtype=dtype)
    if dims == 2 and draw.random() < 0.3:
        x = x.to(memory_format=torch.channels_last)
    return simple(layer, x)


def random_embedding(draw: random.Random, dtype: torch.dtype) -> Case:
    vocabulary = draw.randint(1, 8)
    padding = draw.choice([None, 0, -1])
    layer = nn.Embedding(vocabulary, draw.randint(1, 4), padding_idx=padding, sparse=draw.random() < 0.3, dtype=dtype)
    shape = [draw.randint(0, 5), *(draw.randint(1, 4) for _ in range(draw.randint(0, 2)))]
    ids = torch.randint(vocabulary, shape, dtype=draw.choice([torch.int64, torch.int32]))
    if len(shape) == 3:
        ids = ids.transpose(1, 2)
    return simple(layer, ids)


def random_bag(draw: random.Random, dtype: torch.dtype) -> Case:
    vocabulary, mode = draw.randint(1, 8), draw.choice(["sum", "mean", "max"])
    flat, last = draw.random() < 0.6, draw.random() < 0.5
    layer = nn.EmbeddingBag(
        vocabulary,
        draw.randint(1, 4),
        mode=mode,
        padding_idx=draw.choice([None, 0]),
        include_last_offset=flat and last,
        dtype=dtype,
    )
    records = draw.randint(1, 5)
    if not flat:
        ids = torch.randint(vocabulary, (records, draw.randint(1, 5)))
        weights = torch.randn(ids.shape, dtype=dtype) if mode == "sum" and draw.random() < 0.5 else None
        return (
            layer,
            (ids, None, weights),
            lambda i: (ids[i : i + 1], None, None if weights is None else weights[i : i + 1]),
        )
    sizes = [draw.randint(0, 4) for _ in range(records - 1)] + [draw.randint(1, 4)]
    starts = [sum(sizes[:i]) for i in range(records + 1)]
    ids = torch.randint(vocabulary, (starts[-1],))
    weights = torch.randn(len(ids), dtype=dtype) if mode == "sum" and draw.random() < 0.5 else None
    offsets = torch.tensor(starts if layer.include_last_offset else starts[:-1])

    def of_record(i: int) -> tuple[Any, ...]:
        own = slice(starts[i], starts[i + 1])
        ends = [0, sizes[i]] if layer.include_last_offset else [0]
        return ids[own], torch.tensor(ends), None if weights is None else weights[own]

    return layer, (ids, offsets, weights), of_record


def random_layer_norm(draw: random.Random, dtype: torch.dtype) -> Case:
    inner = [draw.randint(2, 5) for _ in range(draw.randint(1, 2))]
    middle = [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]
    if draw.random() < 0.5:
        layer: nn.Module = nn.RMSNorm(inner, eps=draw.choice([None, 1e-3]), dtype=dtype)
    else:
        layer = nn.LayerNorm(inner, bias=draw.random() < 0.7, dtype=dtype)
    return simple(layer, torch.randn(draw.randint(0, 5), *middle, *inner, dtype=dtype))


def random_group_norm(draw: random.Random, dtype: torch.dtype) -> Case:
    dims, groups = draw.randint(0, 3), draw.randint(1, 3)
    layer = nn.GroupNorm(groups, groups * draw.randint(1, 3), dtype=dtype)
    # A group of one number is always normalised to zero, which torch refuses.
    extent = [draw.randint(1 + (layer.num_channels == groups), 3) for _ in range(dims or 1)]
    x = torch.randn(draw.randint(1, 5), layer.num_channels, *extent, dtype=dtype)
    return simple(layer, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x)


def random_instance_norm(draw: random.Random, dtype: torch.dtype) -> Case:
    dims, running = draw.randint(1, 3), draw.random() < 0.3
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    layer = kind(draw.randint(1, 4), affine=True, track_running_stats=running, dtype=dtype)
    x = torch.randn(draw.randint(1, 5), layer.num_features, *[draw.randint(2, 4)] * dims, dtype=dtype)
    if running:
        layer(x)
        layer.eval()
    return simple(layer, x)


RANDOM = [
    random_linear,
    random_convolution,
    random_embedding,
    random_bag,
    random_layer_norm,
    random_group_norm,
    random_instance_norm,
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.__name__)
def test_random_layers_match_a_loop_over_records(case: Callable[..., Case], dtype: torch.dtype) -> None:
    for seed in range(60):
        torch.manual_seed(seed)
        layer, inputs, of_record = case(random.Random(seed), dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        try:
            assert_layer(layer, inputs, of_record)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {layer}, inputs {[getattr(x, 'shape', x) for x in inputs]}") from error


# -- convolutions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "extent", "methods"),
    [
        ((2, 3), 9, {"rows", "twice", "native", "native twice"}),
        ((32, 32), 3, {"gram", "rows", "twice", "native", "native twice"}),
        ((300, 300), 1, {"gram", "rows", "twice"}),
    ],
)
def test_offers_ways_that_suit_the_sizes_of_a_convolution(
    channels: tuple[int, int], extent: int, methods: set[str]
) -> None:
    layer = nn.Conv2d(*channels, 3, padding=1)
    x = torch.randn(2, channels[0], extent, extent)
    assert set(uses_of(layer, (x,), layer(x).detach())["weight"].methods) == methods


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("extent", [(4, 3), (40, 30)], ids=str)
def test_wide_convolutions_of_more_than_one_piece_match_the_loop(extent: tuple[int, int], groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(32, 24, (3, 2), padding=(1, 0), stride=(1, 2), groups=groups, dtype=torch.float64)
    x = torch.randn(9, 32, *extent, dtype=torch.float64)
    assert_layer(*simple(layer, x))


def test_a_convolution_of_no_records_adds_nothing() -> None:
    layer = nn.Conv2d(2, 3, 3)
    x = torch.randn(0, 2, 5, 5)
    assert_layer(layer, (x,), lambda i: (x[i : i + 1],))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(3, 3, 1), (3, 4, 4)), (nn.Conv1d(3, 3, 1), (3, 4)), (nn.InstanceNorm1d(3, affine=True), (3, 4))],
)
def test_channels_are_not_taken_for_records(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with pytest.raises(UnsupportedModelError, match="without a batch dimension"):
        uses_of(layer, (x,), layer(x).detach())


def test_a_norm_over_records_is_refused() -> None:
    layer, x = nn.LayerNorm([4, 3]), torch.randn(4, 3)
    with pytest.raises(UnsupportedModelError, match="normalises over the first dimension"):
        uses_of(layer, (x,), layer(x).detach())


# -- Gram matrices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(40, 40), (3, 2, 40)),
        (nn.Linear(8, 8), (3, 100, 8)),
        (nn.Linear(8, 8), (2, 5000, 8)),
        (nn.Conv1d(40, 40, 1), (3, 40, 2)),
        (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 14, 12)),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [1e-2, 1e-4, 1e-6])
def test_privacy_norms_bound_sums_whose_terms_cancel(layer: nn.Module, shape: tuple[int, ...], spread: float) -> None:
    """All positions hold nearly the same, and their output gradients add up to nothing."""
    torch.manual_seed(0)
    positions = [1] if isinstance(layer, nn.Linear) else [*range(2, len(shape))]
    x = torch.randn(shape).mean(positions, keepdim=True) + spread * torch.randn(shape)
    gradient = torch.randn(layer(x).shape)
    gradient -= gradient.mean(positions, keepdim=True)
    use = uses_of(layer, (x,), gradient)["weight"]
    wide = copy.deepcopy(layer).double()
    exact = uses_of(wide, (x.double(),), gradient.double())["weight"].rows().flatten(1).square().sum(1)
    for method in use.methods:
        squares, rest = use.start(method, Workspace())
        if "rows" not in method and method != "native":  # those sum what they took the norm of
            torch.testing.assert_close(squares.double(), exact, rtol=1e-5, atol=0)
        for record in range(shape[0]):
            weights, total = torch.zeros(shape[0]), torch.zeros(use.shape)
            weights[record] = squares[record].rsqrt()
            rest.add_to(total, weights, Workspace())
            assert total.norm() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(60, 60), (3, 1500, 60)), (nn.Linear(60, 60), (3, 2, 60)), (nn.Conv2d(8, 8, 3), (2, 8, 120, 120))],
    ids=str,
)
def test_records_are_not_taken_for_cancelled_because_they_are_long(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """What follows an activation is positive, and output gradients are as often positive as negative."""
    torch.manual_seed(0)
    x = torch.randn(shape).relu()
    use = uses_of(layer, (x,), torch.randn(layer(x).shape))["weight"]
    for method in use.methods:
        assert "Mended" not in type(use.start(method, Workspace())[1]).__name__


# -- records that are not finite -------------------------------------------------------------------------------------

FINITE = [
    (nn.Linear(3, 4), (4, 5, 3)),
    (nn.Linear(3, 4), (4, 3)),
    (nn.Conv2d(2, 3, 3), (4, 2, 6, 6)),
    (nn.Conv2d(2, 3, 3, padding=1, groups=1), (4, 2, 3, 3)),
    (nn.LayerNorm(3), (4, 5, 3)),
    (nn.RMSNorm(3), (4, 5, 3)),
    (nn.GroupNorm(2, 4), (4, 4, 3)),
    (nn.InstanceNorm1d(3, affine=True), (4, 3, 5)),
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("layer", "shape"), FINITE, ids=lambda x: type(x).__name__)
@torch.no_grad()
def test_privacy_other_records_do_not_change_by_one_that_is_not_finite(
    layer: nn.Module, shape: tuple[int, ...], value: float
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    gradient = torch.randn_like(layer(x))
    expected = {name: use.rows() for name, use in uses_of(layer, (x[2:],), gradient[2:]).items()}
    x[0], gradient[1] = value, value
    assert_only_finite(layer, (x,), gradient, expected)


def assert_only_finite(layer: nn.Module, inputs: Sequence[Any], gradient: Tensor, expected: dict[str, Tensor]) -> None:
    kept, weights = torch.tensor([False, False, True, True]), torch.tensor([0.0, 0.0, 0.5, 2.0])
    for name, use in uses_of(layer, inputs, gradient).items():
        for method in use.methods:
            squares, rest = use.start(method, Workspace())
            assert_near(squares[2:], expected[name].flatten(1).square().sum(1))
            assert name == "bias" or not squares[:2].isfinite().any()
            total = torch.zeros(use.shape)
            rest.only(kept).add_to(total, weights, Workspace())
            assert_near(total, torch.tensordot(weights[2:], expected[name], 1))


@pytest.mark.parametrize(
    "layer", [nn.Embedding(5, 3), *(nn.EmbeddingBag(5, 3, mode=m) for m in ("sum", "mean", "max"))]
)
@torch.no_grad()
def test_privacy_tables_do_not_change_by_a_record_that_is_not_finite(layer: nn.Module) -> None:
    torch.manual_seed(0)
    ids = torch.randint(5, (4, 6))
    gradient = torch.randn_like(layer(ids))
    expected = {name: use.rows() for name, use in uses_of(layer, (ids[2:],), gradient[2:]).items()}
    gradient[0], gradient[1] = float("nan"), float("inf")
    assert_only_finite(layer, (ids,), gradient, expected)


# -- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_frequencies_in_the_batch_are_refused(kind: type[nn.Module]) -> None:
    layer, ids = kind(5, 3, scale_grad_by_freq=True), torch.zeros(2, 4, dtype=torch.long)  # type: ignore[call-arg]
    with pytest.raises(UnsupportedModelError, match="scale_grad_by_freq"):
        uses_of(layer, (ids,), layer(ids).detach())


class Tied(nn.Module):
    """Embedding, something between, and the embedding's table as a head; perhaps two embeddings."""

    def __init__(self, padding: int | None, twice: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=padding, dtype=dtype)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.twice = twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.twice:
            x = x * self.table(ids.flip(1))
        return self.head(x.tanh())  # type: ignore[no-any-return]


def seen(model: Tied, ids: Tensor, gradient: Tensor) -> list[Use]:
    """Uses of the table, as hooks in the model see them."""
    calls: list[tuple[nn.Module, Any, Tensor]] = []
    for layer in (model.table, model.head):
        layer.register_forward_hook(lambda layer, inputs, output: calls.append((layer, inputs, output)))
    output = model(ids)
    gradients = torch.autograd.grad(output, [call[2] for call in calls], gradient)
    return [
        uses_of(layer, [x.detach() for x in inputs], g)["weight"]
        for (layer, inputs, _), g in zip(calls, gradients, strict=True)
    ]


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_table_that_is_a_head_too_matches_the_loop(
    dtype: torch.dtype, padding: int | None, twice: bool, length: int
) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        model, ids = Tied(padding, twice, dtype), torch.randint(7, (4, length))
        gradient = torch.randn(4, length, 7, dtype=dtype)
        expected = by_record(model, lambda i, ids=ids: (ids[i : i + 1],), gradient)["table.weight"]
        uses = seen(model, ids, gradient)
        for order in (uses, uses[::-1]):
            use = order[0].plus(order[1:])
            assert isinstance(use, TiedHead)
            assert_exact(use, expected)
        assert_exact(Rows(uses[0].rows()).plus(uses[1:]), expected)


def test_privacy_norms_of_a_tied_table_survive_cancellation() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    x, ids = torch.randn(2, 1, 3), torch.tensor([[1], [2]])
    gradient = F.one_hot(ids, 5).float()
    lookup = uses_of(table, (ids,), -x * (1 + 1e-4))["weight"]
    use = lookup.plus([uses_of(head, (x,), gradient)["weight"]])
    expected = use.rows().flatten(1).square().sum(1)
    for method in use.methods:
        torch.testing.assert_close(use.start(method, Workspace())[0], expected, rtol=1e-3, atol=0)


def test_two_uses_of_one_linear_layer_are_one() -> None:
    torch.manual_seed(0)
    layer, x, y = nn.Linear(3, 4), torch.randn(5, 2, 3), torch.randn(5, 3)
    first, second = torch.randn(5, 2, 4), torch.randn(5, 4)
    uses = [uses_of(layer, (x,), first)["weight"], uses_of(layer, (y,), second)["weight"]]
    assert_exact(uses[0].plus(uses[1:]), uses[0].rows() + uses[1].rows())


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "shape"), FINITE, ids=lambda x: type(x).__name__)
@torch.no_grad()
def test_half_precision_is_widened_before_any_sum(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).bfloat16()
    gradient = torch.randn(layer(x.float()).shape).bfloat16()
    for name, use in uses_of(layer, (x,), gradient).items():
        assert_exact(use, uses_of(layer, (x.float(),), gradient.float())[name].rows())
