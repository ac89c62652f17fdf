"""Modules of plain torch layers, as people write them, against a loop over records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

Records = list[tuple[Tensor, Tensor]]
FEATURES = labelled(8)
TOKENS = labelled(5, tokens=9)


class Pair(nn.Module):
    """A bilinear layer of both halves of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.pair(x[:, :4], x[:, 4:])  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Adds and activates in place, wherever autograd allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.activation = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(F.relu_(self.inner(x)))
        y += x
        return self.activation(y)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A residual block as in torchvision, with group norm."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels // stride, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, channels)
        down = nn.Conv2d(channels // stride, channels, 1, stride, bias=False)
        self.downsample = nn.Sequential(down, nn.GroupNorm(2, channels)) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    stem = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*stem, Block(4, 1), Block(8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class Buffers(nn.Module):
    """Complex, integer and temporary buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("order", torch.randperm(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.body(x)[:, self.order].view(-1, 4, 2))
        return self.head(torch.view_as_real(pairs * self.turn.to(pairs.dtype)).flatten(1))  # type: ignore[no-any-return]


class Gain(nn.Module):
    """Takes its arguments by name only, like the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, *, value: Tensor, factor: float) -> Tensor:
        return self.gain * value * factor


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain, self.head = nn.Linear(8, 6), Gain(), nn.Linear(6, 3)

    def forward(self, *, features: Tensor, factor: float = 1.0) -> Tensor:
        hidden = self.body(input=features).tanh()
        return self.head(self.gain(value=hidden, factor=factor))  # type: ignore[no-any-return]


class CalledByName(Classifier):
    def losses(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(features=batch[0], factor=2.0), batch[1], reduction="none")


class Siamese(Classifier):
    """One net, run on both halves of each record in one step."""

    def losses(self, batch: Any) -> Tensor:
        distance = (self.net(batch[0][:, :4]) - self.net(batch[0][:, 4:])).square().sum(1)
        return torch.where(batch[1] > 0, distance, F.relu(1 - distance))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(9, 6, padding_idx=padding), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)).tanh())  # type: ignore[no-any-return]


class NextToken(Classifier):
    def losses(self, batch: Any) -> Tensor:
        ids = batch[0]
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


class Nested(Classifier):
    """A LightningModule made of others."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(Classifier(nn.Linear(8, 6)), nn.Tanh(), Classifier(nn.Linear(6, 3))))


class Checkpointed(nn.Module):
    def __init__(self, *more: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), *more), nn.Linear(8, 3)
        self.first, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant))  # type: ignore[no-any-return]


def shared() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3))


def of_classifier(make_net: Callable[[], nn.Module]) -> Callable[[], Classifier]:
    return lambda: Classifier(make_net())


MODELS: dict[str, tuple[Callable[[], Classifier], Records]] = {
    "in-place activations": (
        of_classifier(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))),
        FEATURES,
    ),
    "residual in place": (of_classifier(lambda: nn.Sequential(Residual(), Residual(), nn.Linear(8, 3))), FEATURES),
    "resnet": (of_classifier(resnet), labelled(3, 8, 8)),
    "PReLU": (
        of_classifier(lambda: nn.Sequential(nn.Linear(8, 6), nn.PReLU(6), nn.Linear(6, 3), nn.PReLU())),
        FEATURES,
    ),
    "transposed convolution": (
        of_classifier(
            lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(196, 3))
        ),
        labelled(2, 3, 3),
    ),
    "embedding with padding": (
        of_classifier(lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))),
        TOKENS,
    ),
    "bag": (of_classifier(lambda: nn.Sequential(nn.EmbeddingBag(9, 4, padding_idx=0), nn.Linear(4, 3))), TOKENS),
    "bilinear": (of_classifier(Pair), FEATURES),
    "layer used twice": (of_classifier(shared), FEATURES),
    "siamese": (lambda: Siamese(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))), FEATURES),
    "tied weights": (lambda: NextToken(Tied()), TOKENS),
    "tied weights with padding": (lambda: NextToken(Tied(0)), TOKENS),
    "buffers": (of_classifier(Buffers), FEATURES),
    "arguments by name": (lambda: CalledByName(ByName()), FEATURES),
    "nested LightningModules": (Nested, FEATURES),
    "checkpointed": (of_classifier(Checkpointed), FEATURES),
}


@pytest.mark.parametrize(("make_module", "records"), MODELS.values(), ids=MODELS.keys())
def test_the_private_gradient_equals_a_loop_over_records(
    make_module: Callable[[], Classifier], records: Records, make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, make_module(), records)


@pytest.mark.parametrize(
    "name", ["residual in place", "layer used twice", "tied weights", "siamese", "arguments by name"]
)
def test_updates_of_several_physical_batches_equal_it_too(name: str, make_private_trainer: TrainerFactory) -> None:
    make_module, records = MODELS[name]
    assert_equals_loop(make_private_trainer, make_module(), records, accumulate_grad_batches=2)


@pytest.mark.parametrize(
    "make_net",
    [
        lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3)),
        lambda: nn.Sequential(Checkpointed(nn.Dropout(0.3)), nn.Dropout(0.1)),
    ],
    ids=["everywhere", "in a checkpoint"],
)
def test_dropout_equals_a_loop_over_records_of_the_same_masks(
    make_net: Callable[[], nn.Module], make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, Classifier(make_net()), FEATURES, together=True)


class PooledTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().sum(1))  # type: ignore[no-any-return]


def padded(records: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([record[0] for record in records], batch_first=True), torch.stack([r[1] for r in records])


@pytest.mark.parametrize("chunks", [1, 2])
def test_sequences_padded_by_a_collate_function_equal_a_loop(chunks: int, make_private_trainer: TrainerFactory) -> None:
    records = [(x[: 2 + i % 4], y) for i, (x, y) in enumerate(labelled(6, 8))]
    module = Classifier(PooledTokens())
    assert_equals_loop(make_private_trainer, module, records, collate_fn=padded, accumulate_grad_batches=chunks)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # torch's own, about its compiler
def test_a_compiled_part_equals_a_loop_over_records(backend: str, make_private_trainer: TrainerFactory) -> None:
    body = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend=backend, dynamic=True)
    assert_equals_loop(make_private_trainer, Classifier(nn.Sequential(body, nn.Linear(8, 3))), FEATURES)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # torch's own, about its compiler
def test_a_module_that_is_compiled_as_a_whole_is_refused_with_the_remedy(make_private_trainer: TrainerFactory) -> None:
    whole: Any = torch.compile(Classifier(nn.Linear(8, 3)), backend="eager")
    assert_refused(make_private_trainer, whole, FEATURES, "runs on the parameters of the original", "compile its parts")
    torch.compiler.reset()


def test_privacy_a_method_that_holds_the_original_does_not_escape_the_checks(
    make_private_trainer: TrainerFactory,
) -> None:
    """A copy of this module runs the step of the original, and its loss ties all records together."""

    class Centred(Classifier):
        def losses(self, batch: Any) -> Tensor:
            return super().losses((batch[0] - batch[0].mean(0), batch[1]))

    module: Any = Centred(nn.Linear(8, 3))
    step = module.training_step
    module.training_step = lambda batch, batch_idx: step(batch, batch_idx)
    parts = "`training_step` of a copy of `Centred` runs on the parameters of the original", "in a subclass"
    assert_refused(make_private_trainer, module, FEATURES, *parts)


def test_a_reentrant_checkpoint_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = Classifier(Checkpointed(use_reentrant=True))
    assert_refused(make_private_trainer, module, FEATURES, "use_reentrant=True", "use_reentrant=False")


class Unused(Classifier):
    """Holds a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 3))
        self.spare = nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:No record of this update has a gradient")
def test_a_layer_that_is_never_called_gets_a_sum_of_zero(make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, Unused(), FEATURES)


class Sometimes(Classifier):
    """Sends each record through one of two layers."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (layer(x) for layer in self.net)  # type: ignore[union-attr]
        return torch.where(x[:, :1] > 0, first, second)


def test_a_choice_of_layers_by_record_equals_a_loop(make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, Sometimes(), FEATURES)


class ChoosesRows(Sometimes):
    """The same, but each layer is given its own records only."""

    def forward(self, x: Tensor) -> Tensor:
        logits, chosen = x.new_zeros(len(x), 3), x[:, 0] > 0
        for layer, rows in zip(self.net, (chosen, ~chosen), strict=True):  # type: ignore[call-overload]
            logits[rows] = layer(x[rows])
        return logits


def test_layers_that_are_given_some_of_the_records_are_refused(make_private_trainer: TrainerFactory) -> None:
    assert_refused(make_private_trainer, ChoosesRows(), FEATURES, "`net.", "rows for", "first dimension")


class SequenceFirst(nn.Module):
    """Turns records into sequences first, as torch's recurrent layers do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(0, 1)).tanh().mean(0))  # type: ignore[no-any-return]


class Flattened(SequenceFirst):
    """Runs its first layer on all tokens of the batch in one dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(0, 1)).tanh().view(len(x), -1, 6).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [SequenceFirst, Flattened])
def test_layers_whose_first_dimension_is_not_that_of_records_are_refused(
    kind: type[nn.Module], make_private_trainer: TrainerFactory
) -> None:
    parts = "`net.body.", "gradient rows for", "Keep records in the first dimension of every layer's input"
    assert_refused(make_private_trainer, Classifier(kind()), labelled(5, 8), *parts)


def test_a_layer_without_a_shape_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = Classifier(nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(3)))
    assert_refused(make_private_trainer, module, FEATURES, "`net.0.weight` has no shape yet", "batch of zeros")


class Teacher(Classifier):
    """Learns from a frozen copy that follows it slowly."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 3))
        self.teacher = nn.Linear(8, 3).requires_grad_(False)

    def losses(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(1)
        return F.cross_entropy(self(batch[0]), target, reduction="none")

    def on_train_batch_end(self, *_: Any) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.data.lerp_(student.data, 0.5)


def test_a_teacher_that_follows_between_updates_equals_a_loop(make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, Teacher(), FEATURES)


# -- functions with a backward pass of their own ---------------------------------------------------------------------


class Rectify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0] > 0)


class Vectorizable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (ctx.saved_tensors[0] > 0)


class WithFunction(nn.Module):
    """Calls a function between its layers, or in a forward pass that uses a parameter of its own."""

    def __init__(self, function: type[torch.autograd.Function], own: bool) -> None:
        super().__init__()
        self.body, self.head, self.function = nn.Linear(8, 8), nn.Linear(8, 3), function
        self.gain = nn.Parameter(torch.ones(8)) if own else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(self.body(x) * self.gain))  # type: ignore[no-any-return,no-untyped-call]


@pytest.mark.parametrize(("function", "own"), [(Rectify, False), (Vectorizable, False), (Vectorizable, True)])
def test_a_custom_function_equals_a_loop_over_records(
    function: type[torch.autograd.Function], own: bool, make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, Classifier(WithFunction(function, own)), FEATURES)


def test_a_custom_function_without_a_vectorized_form_beside_a_parameter_is_refused(
    make_private_trainer: TrainerFactory,
) -> None:
    parts = "`net` (WithFunction)", "setup_context", "a small module of their own", "register_layer"
    assert_refused(make_private_trainer, Classifier(WithFunction(Rectify, own=True)), FEATURES, *parts)


# -- frozen parts ----------------------------------------------------------------------------------------------------


def test_frozen_parts_do_not_count_in_the_norm(make_private_trainer: TrainerFactory) -> None:
    module = Classifier(resnet())
    module.net[4].requires_grad_(False)  # type: ignore[index]
    module.net[5].conv1.requires_grad_(False)  # type: ignore[index,union-attr]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert_equals_loop(make_private_trainer, module, labelled(3, 8, 8))
    for name, parameter in module.named_parameters():
        frozen = name.startswith(("net.4.", "net.5.conv1."))
        assert torch.equal(parameter, before[name].to(parameter.dtype)) or not frozen, name


def test_a_module_in_which_everything_is_frozen_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = Classifier(nn.Linear(8, 3).requires_grad_(False))
    assert_refused(make_private_trainer, module, FEATURES, "there is nothing to train", "`requires_grad_(True)`")


def test_a_complex_parameter_is_refused(make_private_trainer: TrainerFactory) -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.head = nn.Parameter(torch.randn(8, dtype=torch.cfloat)), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.ifft(torch.fft.fft(x) * self.filter).real)  # type: ignore[no-any-return]

    assert_refused(
        make_private_trainer, Classifier(Filter()), FEATURES, "`net.filter` is complex", "`torch.view_as_complex`"
    )


def test_the_loaders_of_these_tests_draw_batches_of_several_sizes(make_private_trainer: TrainerFactory) -> None:
    sizes: list[int] = []

    class Sizes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    make_private_trainer(max_epochs=5).fit(Sizes(nn.Linear(8, 3)), DataLoader(FEATURES, batch_size=6))  # type: ignore[arg-type]
    assert len(set(sizes[-15:])) > 2
