"""Every user mistake is one error that names the thing, the value, the reason and the remedy, and loses nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fixtures import Lit, LitData, attributes_of, make_loader, make_records
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import lightning_dp
from lightning_dp.errors import (
    BudgetExceededError,
    InvalidValueError,
    PrivacyError,
    TrainerSettingsError,
    UnsupportedDataError,
    UnsupportedModelError,
)

# Lightning's own comment on one of the mistakes below.
pytestmark = pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")

BAD_NUMBERS = [-1, -0.5, 0, math.inf, -math.inf, math.nan, "1.0", "", True, [1.0], 1j]


def budget(**settings):
    return lightning_dp.PrivacyBudget(**{"epsilon": 3.0, "delta": 1e-5, "statement": False, **settings})


def monitor(**settings):
    return lightning_dp.PrivacyMonitor(**{"delta": 1e-5, "statement": False, **settings})


# -- constructors ------------------------------------------------------------------------------------------------------

NUMERIC_ARGUMENTS: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (lightning_dp.PrivateStrategy, "noise_multiplier", [value for value in BAD_NUMBERS if value != 0]),
    (lightning_dp.PrivateStrategy, "max_grad_norm", BAD_NUMBERS),
    (lightning_dp.PrivateStrategy, "sampling_rate", [*BAD_NUMBERS, 1.0001, 2]),
    (lightning_dp.PrivateStrategy, "delta", [*BAD_NUMBERS, 1, 1.0, 2]),
    (lightning_dp.PrivateStrategy, "public_size", [*BAD_NUMBERS, 1.5, 64.0]),
    (lightning_dp.PrivateStrategy, "insecure_seed", [*(value for value in BAD_NUMBERS if value != 0), 1.5]),
    (budget, "epsilon", BAD_NUMBERS),
    (budget, "delta", [*BAD_NUMBERS, 1, 1.0, 2]),
    (monitor, "delta", [*BAD_NUMBERS, 1, 1.0, 2]),
]
BAD_VALUES = [
    pytest.param(make, name, value, id=f"{make.__name__}-{name}-{value!r}")
    for make, name, values in NUMERIC_ARGUMENTS
    for value in values
]


@pytest.mark.parametrize(("make", "name", "value"), BAD_VALUES)
def test_constructor_refuses_a_bad_number_and_says_which(make, name, value):
    with pytest.raises(InvalidValueError, match=f"`{name}`") as error:
        make(**{name: value})
    assert repr(value).lower() in str(error.value).lower()  # NaN may be written in capitals
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("make", [budget, monitor])
def test_delta_of_a_callback_cannot_be_left_open(make):
    with pytest.raises(InvalidValueError, match="`delta`"):
        make(delta=None)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        pytest.param(lightning_dp.PrivateStrategy, "previous_checkpoints", "a.ckpt", id="path-for-list-of-paths"),
        pytest.param(lightning_dp.PrivateStrategy, "allow_missing_ledger", "false", id="string-for-flag"),
        pytest.param(budget, "metrics", "val_acc", id="budget-name-for-list-of-names"),
        pytest.param(monitor, "metrics", "val_acc", id="monitor-name-for-list-of-names"),
        pytest.param(budget, "statement", "false", id="budget-string-for-flag"),
    ],
)
def test_constructor_refuses_a_string_in_place_of_another_type(make, name, value):
    with pytest.raises(InvalidValueError, match=f"`{name}`") as error:
        make(**{name: value})
    assert repr(value) in str(error.value)


# -- modules -----------------------------------------------------------------------------------------------------------


class Repairable(Lit):
    """A module with a mistake that :meth:`repair` takes out."""

    mistake = True

    def repair(self) -> None:
        self.mistake = False


class WithBatchNorm(Repairable):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))

    def repair(self) -> None:
        self.net[1] = nn.GroupNorm(4, 16)


class WithInstanceStatistics(Repairable):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, features):
        return self.net(self.norm(features[:, None])[:, 0])

    def repair(self) -> None:
        self.norm = nn.InstanceNorm1d(1)


class WithoutLoss(Repairable):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.mistake else loss


class WithoutLossLater(Repairable):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.mistake and self.global_step == 1 else loss


class WithOtherOptimizers(Repairable):
    def make(self) -> Any:
        raise NotImplementedError

    def configure_optimizers(self):
        return self.make() if self.mistake else super().configure_optimizers()


class WithTwoOptimizers(WithOtherOptimizers):
    def make(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class WithTwoOptimizersByHand(WithTwoOptimizers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()


class WithLBFGS(WithOtherOptimizers):
    def make(self):
        return torch.optim.LBFGS(self.parameters())


class WithForeignParameters(WithOtherOptimizers):
    def make(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(5))], lr=0.1)


class WithoutTrainable(Repairable):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).requires_grad_()

    def repair(self) -> None:
        self.requires_grad_(True)


class WithOwnFetching(Repairable):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)

    def repair(self) -> None:
        self.training_step = super().training_step


# -- data --------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_records())


class EveryOther(Sampler):
    def __iter__(self):
        return iter(range(0, 64, 2))

    def __len__(self):
        return 32


class OwnLoader:
    def __iter__(self):
        return iter([make_records().tensors])

    def __len__(self):
        return 1


def with_sampler(make: Callable[[], Any]) -> Callable[[], DataLoader]:
    return lambda: make_loader(shuffle=False, sampler=make())


def with_dataset(make: Callable[[], Any]) -> Callable[[], DataLoader]:
    return lambda: DataLoader(make(), batch_size=16, shuffle=True)


def with_batch_sampler() -> DataLoader:
    class Batches(BatchSampler):
        pass

    return DataLoader(make_records(), batch_sampler=Batches(SequentialSampler(make_records()), 16, drop_last=False))


def overlapping() -> ConcatDataset:
    records = make_records()
    return ConcatDataset([Subset(records, range(40)), Subset(records, range(30, 64))])


# -- everything that `fit` must refuse ---------------------------------------------------------------------------------

FIXED = {"noise_multiplier": 1.0}


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake, made by otherwise correct settings.

    Attributes:
        name: Of the test.
        error: What must be raised.
        words: What the message must hold: the thing, the value, the remedy.
        strategy: Arguments of the strategy.
        trainer: Makes arguments of the Trainer.
        module: Makes the module.
        data: Makes the training data; ``None``: a data module that must not be touched before the error.
        hooks: Which hooks of that data module Lightning runs before anything could be refused.
    """

    name: str
    error: type[PrivacyError]
    words: tuple[str, ...]
    strategy: dict[str, Any] | None = field(default_factory=lambda: FIXED)
    trainer: Callable[[], dict[str, Any]] = dict
    module: Callable[[], Lit] = Lit
    data: Callable[[], Any] | None = None
    hooks: tuple[str, ...] = ()


def refused_callbacks() -> list[Mistake]:
    made = {
        "budget and monitor": ([budget, monitor], ("2 callbacks", "PrivacyBudget, PrivacyMonitor", "Keep one")),
        "accumulation scheduler": (
            [lambda: GradientAccumulationScheduler({0: 1, 1: 2})],
            ("`GradientAccumulationScheduler`", "sampling rate", "accumulate_grad_batches="),
        ),
        "learning rate finder": ([LearningRateFinder], ("`LearningRateFinder`", "public data")),
        "batch size finder": ([BatchSizeFinder], ("`BatchSizeFinder`", "accumulate_grad_batches")),
    }
    return [
        Mistake(
            name=name,
            error=TrainerSettingsError,
            words=words,
            trainer=lambda makers=makers: {"callbacks": [make() for make in makers]},
        )
        for name, (makers, words) in made.items()
    ]


SETTINGS_MISTAKES = [
    Mistake(
        name="no noise and no budget",
        error=TrainerSettingsError,
        words=("noise multiplier", "no default noise", "PrivacyBudget(", "PrivateStrategy(noise_multiplier="),
        strategy={},
    ),
    Mistake(
        name="no noise and only a monitor",
        error=TrainerSettingsError,
        words=("noise multiplier", "PrivacyBudget(", "PrivateStrategy(noise_multiplier="),
        strategy={},
        trainer=lambda: {"callbacks": [monitor()]},
    ),
    Mistake(
        name="endless run to calibrate",
        error=TrainerSettingsError,
        words=("`max_epochs=-1`", "`max_steps`", "PrivateStrategy(noise_multiplier="),
        strategy={},
        trainer=lambda: {"callbacks": [budget()], "max_epochs": -1},
    ),
    Mistake(
        name="float16 mixed",
        error=TrainerSettingsError,
        words=("precision='16-mixed'", "scales the loss", "'bf16-mixed'"),
        trainer=lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]},
    ),
    Mistake(
        name="float16 true",
        error=TrainerSettingsError,
        words=("precision='16-true'", "'bf16-true'"),
        trainer=lambda: {"plugins": [HalfPrecision("16-true")]},
    ),
    Mistake(
        name="overfit batches",
        error=TrainerSettingsError,
        words=("`overfit_batches=2`", "Subset"),
        trainer=lambda: {"overfit_batches": 2},
    ),
    Mistake(
        name="two devices",
        error=TrainerSettingsError,
        words=("2", "`devices=1`"),
        trainer=lambda: {"devices": 2},
    ),
    Mistake(
        name="budget without private strategy",
        error=TrainerSettingsError,
        words=("`PrivacyBudget`", "SingleDeviceStrategy", "strategy='private'"),
        strategy=None,
        trainer=lambda: {"callbacks": [budget()]},
        hooks=("prepare_data", "setup"),
    ),
    Mistake(
        name="monitor without private strategy",
        error=TrainerSettingsError,
        words=("`PrivacyMonitor`", "SingleDeviceStrategy", "strategy='private'"),
        strategy=None,
        trainer=lambda: {"callbacks": [monitor()]},
        hooks=("prepare_data", "setup"),
    ),
    *refused_callbacks(),
]

NUMBERS_OF_RECORDS_MISTAKES = [
    Mistake(
        name="batch larger than data",
        error=InvalidValueError,
        words=("batch_size", "65", "64", "Lower"),
        data=lambda: make_loader(batch_size=65),
    ),
    Mistake(
        name="accumulated batch larger than data",
        error=InvalidValueError,
        words=("accumulate_grad_batches", "80", "64", "Lower"),
        trainer=lambda: {"accumulate_grad_batches": 5},
        data=make_loader,
    ),
    Mistake(
        name="partial logical batch",
        error=TrainerSettingsError,
        words=("`limit_train_batches=3`", "`accumulate_grad_batches=2`", "multiple of 2"),
        trainer=lambda: {"limit_train_batches": 3, "accumulate_grad_batches": 2},
        data=lambda: make_loader(batch_size=8),
    ),
    *(
        Mistake(
            name=f"delta of {owner} not below one record",
            error=InvalidValueError,
            words=("`delta=0.02`", "1/64", "Choose"),
            strategy=strategy,
            trainer=trainer,
            data=make_loader,
        )
        for owner, strategy, trainer in (
            ("budget", {}, lambda: {"callbacks": [budget(delta=0.02)]}),
            ("monitor", FIXED, lambda: {"callbacks": [monitor(delta=0.02)]}),
            ("strategy", {**FIXED, "delta": 0.02}, dict),
        )
    ),
    Mistake(
        name="delta of exactly one record",
        error=InvalidValueError,
        words=("`delta=0.015625`", "1/64", "Choose"),
        strategy={},
        trainer=lambda: {"callbacks": [budget(delta=1 / 64)]},
        data=make_loader,
    ),
    Mistake(
        name="not one update fits",
        error=BudgetExceededError,
        words=("0.01", "noise multiplier 0.5", "sampling rate 0.25", "Raise `epsilon`"),
        strategy={"noise_multiplier": 0.5},
        trainer=lambda: {"callbacks": [budget(epsilon=0.01)]},
        data=make_loader,
    ),
]

DATA_MISTAKES = [
    Mistake(name=name, error=UnsupportedDataError, words=words, data=data)
    for name, words, data in [
        (
            "weighted sampler",
            ("`WeightedRandomSampler`", "class weights", "sampling_rate="),
            with_sampler(lambda: WeightedRandomSampler([1.0] * 64, 64)),
        ),
        ("own sampler", ("`EveryOther`", "Remove the sampler"), with_sampler(EveryOther)),
        ("subset sampler", ("`SubsetRandomSampler`", "Subset`"), with_sampler(lambda: SubsetRandomSampler(range(9)))),
        (
            "sampling with replacement",
            ("`RandomSampler`", "sampling_rate="),
            with_sampler(lambda: RandomSampler(make_records(), replacement=True)),
        ),
        (
            "sampling a part",
            ("`RandomSampler`", "sampling_rate="),
            with_sampler(lambda: RandomSampler(make_records(), num_samples=10)),
        ),
        ("batch sampler", ("Batches", "`DataLoader(dataset, batch_size=...)`"), with_batch_sampler),
        ("no batch size", ("batch", "`DataLoader(dataset, batch_size=...)`"), lambda: DataLoader(make_records(), None)),
        ("stream", ("`Stream`", "`__getitem__`"), lambda: DataLoader(Stream(), batch_size=16)),
        ("no loader", ("`OwnLoader`", "DataLoader"), OwnLoader),
        ("list of loaders", ("several loaders", "ConcatDataset"), lambda: [make_loader(), make_loader()]),
        ("dict of loaders", ("several loaders", "ConcatDataset"), lambda: {"a": make_loader(), "b": make_loader()}),
        ("repeats", ("`Subset`", "1 of", "Remove"), with_dataset(lambda: Subset(make_records(), [*range(64), 5]))),
        (
            "repeats by a negative index",
            ("`Subset`", "1 of", "Remove"),
            with_dataset(lambda: Subset(make_records(), [*range(64), -1])),
        ),
        (
            "repeats inside a subset",
            ("`Subset`", "2 of", "Remove"),
            with_dataset(lambda: Subset(Subset(make_records(), [*range(62), 3, 4]), range(64))),
        ),
        (
            "repeats inside a concatenation",
            ("`Subset`", "1 of", "Remove"),
            with_dataset(lambda: ConcatDataset([make_records(), Subset(make_records(), [0, 1, 1])])),
        ),
        (
            "data set concatenated with itself",
            ("`ConcatDataset`", "more than once", "Remove"),
            with_dataset(lambda: ConcatDataset([make_records()] * 2)),
        ),
        (
            "overlapping subsets",
            ("`ConcatDataset`", "more than once", "Remove"),
            with_dataset(overlapping),
        ),
    ]
]

MODEL_MISTAKES = [
    Mistake(name=module.__name__, error=error, words=words, module=module, data=make_loader, trainer=trainer)
    for module, error, words, trainer in [
        (WithBatchNorm, UnsupportedModelError, ("`net.1`", "BatchNorm1d", "mixes", "GroupNorm"), dict),
        (WithInstanceStatistics, UnsupportedModelError, ("`norm`", "InstanceNorm1d", "statistics", "Replace"), dict),
        (WithoutLoss, UnsupportedModelError, ("`training_step`", "None", "loss"), dict),
        (WithoutLossLater, UnsupportedModelError, ("`training_step`", "None", "Return a loss"), dict),
        (WithTwoOptimizers, TrainerSettingsError, ("several optimizers", "Return one optimizer"), dict),
        (WithTwoOptimizersByHand, TrainerSettingsError, ("2 optimizers", "Return one optimizer"), dict),
        (WithLBFGS, TrainerSettingsError, ("`LBFGS`", "several times", "SGD or Adam"), dict),
        (WithForeignParameters, UnsupportedModelError, ("1 parameter", "(5,)"), dict),
        (WithoutTrainable, UnsupportedModelError, ("No parameter", "requires_grad_(True)"), dict),
        (WithOwnFetching, UnsupportedModelError, ("`training_step", "dataloader_iter", "`batch`"), dict),
    ]
]

MISTAKES = [*SETTINGS_MISTAKES, *NUMBERS_OF_RECORDS_MISTAKES, *DATA_MISTAKES, *MODEL_MISTAKES]


def make_mistake(mistake: Mistake, make_trainer: Callable[..., pl.Trainer], module: Lit) -> tuple[Any, Any, Any]:
    """Runs into the mistake; returns the error, the data module if one took part, and the strategy."""
    strategy = None if mistake.strategy is None else lightning_dp.PrivateStrategy(**mistake.strategy)
    datamodule = LitData() if mistake.data is None else None
    data = {"datamodule": datamodule} if mistake.data is None else {"train_dataloaders": mistake.data()}
    with pytest.raises(Exception) as error:  # noqa: PT011 - each test says what it must be
        make_trainer(**({} if strategy is None else {"strategy": strategy}), **mistake.trainer()).fit(module, **data)
    return error.value, datamodule, strategy


def by_name(mistakes: list[Mistake]) -> Any:
    return pytest.mark.parametrize("mistake", mistakes, ids=lambda mistake: mistake.name.replace(" ", "-"))


@by_name(MISTAKES)
def test_mistake_is_one_error_that_names_thing_value_and_remedy(mistake, make_trainer):
    error, _, _ = make_mistake(mistake, make_trainer, mistake.module())
    assert type(error) is mistake.error, repr(error)
    for word in mistake.words:
        assert word in str(error)


@pytest.mark.parametrize("error", [TrainerSettingsError, UnsupportedDataError, UnsupportedModelError])
def test_fault_of_lightnings_own_objects_is_lightnings_own_exception_too(error):
    assert issubclass(error, MisconfigurationException)
    assert issubclass(error, PrivacyError)


@by_name([mistake for mistake in MISTAKES if mistake.data is None])
def test_fault_of_the_settings_is_found_before_data_is_touched(mistake, make_trainer):
    _, datamodule, _ = make_mistake(mistake, make_trainer, mistake.module())
    assert tuple(datamodule.calls) == mistake.hooks


@by_name(MISTAKES)
def test_mistake_loses_nothing(mistake, make_trainer, make_private_trainer):
    module = mistake.module()
    _, _, strategy = make_mistake(mistake, make_trainer, module)
    assert attributes_of(module) == attributes_of(mistake.module())
    if strategy is not None:
        # The only mistake that shows while training runs is made after one update.
        assert strategy.ledger.num_updates == (1 if mistake.module is WithoutLossLater else 0)

    if isinstance(module, Repairable):
        module.repair()
    correct = make_private_trainer(max_epochs=1)
    correct.fit(module, make_loader())
    assert correct.strategy.ledger.num_updates == correct.global_step == 4


def test_overspent_budget_is_found_before_data_is_touched(make_private_trainer):
    datamodule = LitData()
    trainer = make_private_trainer(callbacks=[budget(epsilon=1.0)])
    release = lightning_dp.PoissonSampled(lightning_dp.Gaussian(1.0), 0.25)
    trainer.strategy.ledger.record(release, count=100)
    spent = trainer.strategy.ledger.epsilon(1e-5)
    with pytest.raises(
        BudgetExceededError, match=r"epsilon = 1 at delta = 1e-05.*100 updates.*Raise `epsilon`"
    ) as error:
        trainer.fit(Lit(), datamodule=datamodule)
    assert f"{spent:.6g}" in str(error.value)
    assert datamodule.calls == []


@pytest.mark.parametrize("make", [budget, monitor])
def test_two_privacy_callbacks_of_one_kind_are_refused_by_lightning_itself(make, make_private_trainer):
    with pytest.raises(RuntimeError, match=r"more than one stateful callback of type `Privacy\w+`"):
        make_private_trainer(callbacks=[make(), make()])


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_tuner_is_refused_and_the_trainer_stays_usable(method, make_private_trainer):
    trainer, module, datamodule = make_private_trainer(max_epochs=1), Lit(), LitData()
    with pytest.raises(TrainerSettingsError, match="private records"):
        getattr(Tuner(trainer), method)(module, datamodule=datamodule)
    assert datamodule.calls == []
    assert trainer.strategy.ledger.num_updates == 0
    assert attributes_of(module) == attributes_of(Lit())


def test_previous_checkpoint_that_does_not_exist_is_named(make_private_trainer, tmp_path):
    path = str(tmp_path / "none.ckpt")
    datamodule = LitData()
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        make_private_trainer(strategy={"previous_checkpoints": [path]}).fit(Lit(), datamodule=datamodule)
    assert datamodule.calls == []


def test_guarantee_without_a_delta_says_where_to_give_one():
    strategy = lightning_dp.PrivateStrategy(noise_multiplier=1.0)
    with pytest.raises(InvalidValueError, match=r"PrivateStrategy\(delta=1e-5\)"):
        _ = strategy.guarantee


def test_names_of_the_mistakes_are_distinct():
    names = [mistake.name for mistake in MISTAKES]
    assert [name for name, group in itertools.groupby(sorted(names)) if len(list(group)) > 1] == []
