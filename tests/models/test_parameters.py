"""Parameters outside of torch's own layers: direct ones, containers of them, and parametrized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader

FEATURES = labelled(8)
TOKENS = labelled(5, tokens=9)


class Patches(nn.Module):
    """Like a vision transformer: class token, table of positions and layer scale, all direct parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x + self.scale * self.mix(self.dropout(x) + x.mean(1, keepdim=True)).tanh()
        return self.head(x[:, 0])  # type: ignore[no-any-return]


class PatchesOfModule(Classifier):
    """The LightningModule itself has the token and the positions."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 3))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.net(x.tanh().mean(1))  # type: ignore[no-any-return]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 8), torch.randn(8, 3)])
        self.more = nn.ParameterDict({"bias": torch.zeros(3), "deep": nn.ParameterDict({"scale": torch.ones(())})})

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.weights[0]).tanh() @ self.weights[1] + self.more["bias"]
        return logits * self.more["deep"]["scale"]


class Holder(nn.Module):
    """Has a parameter and methods, but no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6))

    def project(self, x: Tensor) -> Tensor:
        return x @ self.table


class UsesHolder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.deep = nn.ModuleList([nn.ParameterList([torch.randn(6, 3)])])

    def forward(self, x: Tensor) -> Tensor:
        return self.holder.project(x).tanh() @ self.deep[0][0]  # type: ignore[index,no-any-return]


class HoldsList(nn.Module):
    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.held = parameters

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.held[0]).tanh()


def two_with_one_list() -> nn.Module:
    parameters = nn.ParameterList([torch.randn(8, 8)])
    return nn.Sequential(HoldsList(parameters), HoldsList(parameters), nn.Linear(8, 3))


class TiedDirections(nn.Module):
    """The head's weight has a length of its own and the direction of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), parametrizations.weight_norm(nn.Linear(6, 9, bias=False))
        self.head.parametrizations.weight.original1 = self.embed.weight  # type: ignore[union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh()).mean(1)[:, :3]  # type: ignore[no-any-return]


class TwoOutputs(nn.Module):
    """Puts out a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.table, x


class FirstOfTwo(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0]  # type: ignore[no-any-return]


class CachedWeights(Classifier):
    """Runs forward and backward pass while parametrized weights are cached."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 6)), nn.ReLU(), nn.Linear(6, 3)))
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self._trainer is None or not self.trainer.training:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        with parametrize.cached():
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr,call-arg]
        return torch.zeros(())


class Correction(nn.Module):
    """Adds a product of two small matrices to a frozen weight, one of them in a layer."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, columns)), nn.Linear(2, rows, bias=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b.weight @ self.a


class Mask(nn.Module):
    """Keeps half of the weights at zero."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (weight.abs() > weight.abs().median()).float())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def parametrized(make: Callable[[Tensor], nn.Module]) -> nn.Module:
    layer = nn.Linear(8, 6)
    return parametrize.register_parametrization(layer, "weight", make(layer.weight.detach()))


def frozen_below(layer: nn.Module) -> nn.Module:
    layer.parametrizations.weight.original.requires_grad_(False)  # type: ignore[union-attr,operator]
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 6), use_trivialization=False),
    "mask": lambda: parametrized(Mask),
    "low rank": lambda: frozen_below(parametrized(lambda w: Correction(*w.shape))),
    "two in a row": lambda: parametrize.register_parametrization(parametrized(Mask), "weight", Correction(6, 8)),
    "weight and bias": lambda: parametrize.register_parametrization(parametrized(Mask), "bias", nn.Tanh()),
}

MODELS: dict[str, tuple[Callable[[], Classifier], list[tuple[Tensor, Tensor]]]] = {
    "token, positions and layer scale": (lambda: Classifier(Patches()), labelled(4, 8)),
    "token and positions of the LightningModule": (PatchesOfModule, labelled(4, 8)),
    "lists and dictionaries of parameters": (lambda: Classifier(Containers()), FEATURES),
    "modules without a forward pass": (lambda: Classifier(UsesHolder()), FEATURES),
    "two modules with one list": (lambda: Classifier(two_with_one_list()), FEATURES),
    "tied below a parametrization": (lambda: Classifier(TiedDirections()), TOKENS),
    "cached weights": (CachedWeights, FEATURES),
    "weight norm of a convolution": (
        lambda: Classifier(
            nn.Sequential(parametrizations.weight_norm(nn.Conv2d(2, 4, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        ),
        labelled(2, 3, 3),
    ),
    "weight norm of an embedding": (
        lambda: Classifier(
            nn.Sequential(parametrizations.weight_norm(nn.Embedding(9, 4)), nn.Flatten(), nn.Linear(20, 3))
        ),
        TOKENS,
    ),
}


@pytest.mark.parametrize(("make_module", "records"), MODELS.values(), ids=MODELS.keys())
def test_the_private_gradient_equals_a_loop_over_records(
    make_module: Callable[[], Classifier], records: list[tuple[Tensor, Tensor]], make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, make_module(), records)


@pytest.mark.parametrize("make_layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_parametrized_layer_equals_a_loop_over_records(
    make_layer: Callable[[], nn.Module], make_private_trainer: TrainerFactory
) -> None:
    module = Classifier(nn.Sequential(make_layer(), nn.ReLU(), nn.Linear(6, 3)))
    assert_equals_loop(make_private_trainer, module, FEATURES)


def test_a_parametrized_layer_that_runs_twice_equals_a_loop(make_private_trainer: TrainerFactory) -> None:
    layer = parametrizations.weight_norm(nn.Linear(8, 8))
    module = Classifier(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3)))
    assert_equals_loop(make_private_trainer, module, FEATURES)


class ReadsWeight(Classifier):
    """Uses a parametrized weight once more, outside of its layer."""

    def losses(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.net[0](batch[0]) + F.linear(batch[0], self.net[0].weight)  # type: ignore[index]
        return F.cross_entropy(self.net[1](hidden), batch[1], reduction="none")  # type: ignore[index]


def test_a_parametrized_weight_that_is_read_elsewhere_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = ReadsWeight(nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 6)), nn.Linear(6, 3)))
    assert_refused(make_private_trainer, module, FEATURES, "`net.0.parametrizations.weight.original", "outside")


class PenalizedWeights(Classifier):
    """Adds a penalty that no record has a share in."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.net.weight.square().sum()  # type: ignore[union-attr,operator]


def test_a_penalty_on_weights_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = PenalizedWeights(nn.Linear(8, 3))
    assert_refused(make_private_trainer, module, FEATURES, "`net.weight` is used outside the forward of module `net`")


def test_spectral_norm_that_follows_the_weight_is_refused_with_its_buffer(make_private_trainer: TrainerFactory) -> None:
    module = Classifier(nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 6)), nn.Linear(6, 3)))
    parts = "`net.0.parametrizations.weight.0._u` is changed by `training_step` itself", "Keep it fixed"
    assert_refused(make_private_trainer, module, FEATURES, *parts)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # Lightning's hint; here it is intended
def test_spectral_norm_in_eval_mode_equals_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    module = Classifier(nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 6)).eval(), nn.Linear(6, 3)))
    assert_equals_loop(make_private_trainer, module, FEATURES)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # torch's own, of the old function
@pytest.mark.parametrize(
    ("make_layer", "parts"),
    [
        (lambda: nn.utils.weight_norm(nn.Linear(8, 6)), ("cannot be copied", "parametrizations.weight_norm`")),
        (lambda: nn.utils.spectral_norm(nn.Linear(8, 6)), ("`net.0` (Linear)", "`torch.nn.utils.parametrizations`")),
        (
            lambda: prune.l1_unstructured(nn.Linear(8, 6), "weight", 0.5),
            ("cannot be copied", "`torch.nn.utils.prune`", "a mask as a parametrization"),
        ),
    ],
    ids=["weight_norm", "spectral_norm", "pruning"],
)
def test_old_hooks_that_compute_weights_are_refused_with_what_replaces_them(
    make_layer: Callable[[], nn.Module], parts: tuple[str, ...], make_private_trainer: TrainerFactory
) -> None:
    module = Classifier(nn.Sequential(make_layer(), nn.ReLU(), nn.Linear(6, 3)))
    assert_refused(make_private_trainer, module, FEATURES, *parts)


def test_a_module_that_puts_out_a_pair_is_refused(make_private_trainer: TrainerFactory) -> None:
    parts = "`net.table` is used in the forward of module `net` (TwoOutputs)", "puts out a tuple", "one tensor"
    assert_refused(make_private_trainer, FirstOfTwo(TwoOutputs()), FEATURES, *parts)


def test_pruning_that_was_made_permanent_equals_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    layer = prune.remove(prune.l1_unstructured(nn.Linear(8, 6), "weight", 0.5), "weight")
    module = Classifier(nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3)))
    assert_equals_loop(make_private_trainer, module, FEATURES)


def test_dropout_in_the_forward_pass_that_uses_direct_parameters_is_refused(
    make_private_trainer: TrainerFactory,
) -> None:
    parts = "`net` (Patches)", "draws random numbers (dropout)", "a small module of their own"
    assert_refused(make_private_trainer, Classifier(Patches(dropout=0.2)), labelled(4, 8), *parts)


class Positions(nn.Module):
    """Looks up positions once for all records."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(9, 6), nn.Embedding(5, 6), nn.Linear(6, 3)
        self.each = each

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[None]
        x = self.words(ids) + self.positions(places.expand(len(ids), -1) if self.each else places)
        return self.head(x.tanh().mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("each", [False, True])
def test_positions_equal_a_loop_over_records(each: bool, engine: str, make_private_trainer: TrainerFactory) -> None:
    module = Classifier(Positions(each))
    assert_equals_loop(make_private_trainer, module, TOKENS, strategy={"gradient_engine": engine})


def test_validation_on_single_records_looks_positions_up_once(make_private_trainer: TrainerFactory) -> None:
    shapes = []

    class Validating(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            shapes.append(tuple(self.net.positions(torch.arange(5)[None]).shape))  # type: ignore[operator,union-attr]

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TOKENS, batch_size=1)

    assert_equals_loop(make_private_trainer, Validating(Positions(each=False)), TOKENS, limit_val_batches=1)
    assert set(shapes) == {(1, 5, 6)}


@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
def test_a_row_of_positions_that_is_taken_apart_is_refused(engine: str, make_private_trainer: TrainerFactory) -> None:
    """The first row of a lookup is that of the first record, and no longer that of all."""

    class Apart(Positions):
        def forward(self, ids: Tensor) -> Tensor:
            places = self.positions(torch.arange(ids.shape[1])[None])[0]
            return self.head((self.words(ids) + places).tanh().mean(1))  # type: ignore[no-any-return]

    strategy = {"gradient_engine": engine}
    module = Classifier(Apart(each=False))
    assert_refused(make_private_trainer, module, TOKENS, "`net.positions.weight`", strategy=strategy)


def test_one_dimensional_positions_are_refused(make_private_trainer: TrainerFactory) -> None:
    class Flat(Positions):
        def forward(self, ids: Tensor) -> Tensor:
            places = self.positions(torch.arange(ids.shape[1]))
            return self.head((self.words(ids) + places).tanh().mean(1))  # type: ignore[no-any-return]

    module = Classifier(Flat(each=False))
    assert_refused(
        make_private_trainer,
        module,
        TOKENS,
        "`net.positions.weight` has 5",
        "`net.positions(torch.arange(length)[None])`",
    )
