"""Parts that are frozen, and unfrozen later; adapters of the peft package."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TrainerFactory
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from test_hugging_face import FLOAT32, OwnLoss, OwnLossOfClasses, RecordLoss, bert, gpt2, texts
from torch import Tensor, nn
from torch.nn import functional as F

peft = pytest.importorskip("peft")

FEATURES = labelled(8)

# transformers' own, of a name that peft still uses.
renamed = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


class TwoParts(Classifier):
    """A backbone and a head; the optimizer starts with what is not frozen."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.backbone, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Names(pl.Callback):
    """Keeps which parameters the optimizer is given gradients for, update by update."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.found.append({name for name, p in pl_module.named_parameters() if p.grad is not None})


HEAD, ALL = {"head.weight", "head.bias"}, {"head.weight", "head.bias", "backbone.0.weight", "backbone.0.bias"}


def test_a_backbone_that_is_unfrozen_later_is_clipped_from_then_on(make_private_trainer: TrainerFactory) -> None:
    """Three updates an epoch, and the backbone comes in with the second epoch."""
    names = Names()
    finetuning = BackboneFinetuning(1, lambda epoch: 1.0)
    assert_equals_loop(make_private_trainer, TwoParts(), FEATURES, callbacks=[finetuning, names], max_steps=6)
    assert names.found == [HEAD] * 3 + [ALL] * 3


class FreezesLater(BaseFinetuning):
    """Freezes the backbone after the first epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.freeze(pl_module.backbone)  # type: ignore[arg-type]


def test_a_backbone_that_is_frozen_later_gets_no_noise_from_then_on(make_private_trainer: TrainerFactory) -> None:
    names, module = Names(), TwoParts()
    states: list[Tensor] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            states.append(module.backbone[0].weight.detach().clone())  # type: ignore[union-attr]

    strategy = {"noise_multiplier": 1.0}
    trainer = make_private_trainer(strategy=strategy, max_epochs=2, callbacks=[FreezesLater(), names, Watch()])
    trainer.fit(module, torch.utils.data.DataLoader(FEATURES, batch_size=6))  # type: ignore[arg-type]
    assert names.found == [ALL] * 3 + [HEAD] * 3
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(states)]
    assert moved == [True] * 2 + [False] * 3


class UnfreezesInside(TwoParts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.backbone.requires_grad_(self.global_step >= 1)
        return super().training_step(batch, batch_idx)


def test_unfreezing_inside_training_step_is_refused(make_private_trainer: TrainerFactory) -> None:
    module = UnfreezesInside()
    module.backbone.requires_grad_(False)
    parts = "`backbone.0.bias` was frozen or unfrozen inside `training_step`", "`on_train_epoch_start`"
    assert_refused(make_private_trainer, module, FEATURES, *parts, updates=1)


# -- peft ------------------------------------------------------------------------------------------------------------


def adapted(net: nn.Module, config: Any) -> nn.Module:
    """With adapters that do not start at zero, so that every one of their matrices has a gradient."""
    model: nn.Module = peft.get_peft_model(net, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter)
    return model


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(40, 3))


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "lora_dropout": 0.0, "target_modules": ["0"], **settings})


ADAPTERS: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "by name": (lambda: adapted(perceptron(), lora(target_modules=["0", "2"])), FEATURES),
    "with a head that is trained whole": (lambda: adapted(perceptron(), lora(modules_to_save=["2"])), FEATURES),
    "with biases": (lambda: adapted(perceptron(), lora(bias="lora_only")), FEATURES),
    "of other scale": (lambda: adapted(perceptron(), lora(use_rslora=True, lora_alpha=16)), FEATURES),
    "of an embedding": (lambda: adapted(tokens(), lora()), labelled(5, tokens=9)),
    "IA3": (
        lambda: adapted(perceptron(), peft.IA3Config(target_modules=["0"], feedforward_modules=[])),
        FEATURES,
    ),
}


@pytest.mark.parametrize(("make_net", "records"), ADAPTERS.values(), ids=ADAPTERS.keys())
def test_adapters_of_a_plain_net_equal_a_loop_over_records(
    make_net: Callable[[], nn.Module], records: list[Any], make_private_trainer: TrainerFactory
) -> None:
    assert_equals_loop(make_private_trainer, Classifier(make_net()), records)


def changed_by_training(module: Classifier, before: Mapping[str, Tensor]) -> set[str]:
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name].to(value.dtype))}


@renamed
def test_adapters_of_bert_equal_a_loop_and_nothing_else_moves(make_private_trainer: TrainerFactory) -> None:
    config = lora(target_modules=["query", "value"], task_type="SEQ_CLS")
    module = OwnLoss(adapted(bert(), config))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert_equals_loop(make_private_trainer, module, texts(), tolerance=FLOAT32)
    assert changed_by_training(module, before) == trained
    assert {name.split(".")[-3] for name in trained if "lora" in name} == {"lora_A", "lora_B"}


@renamed
def test_adapters_with_dropout_equal_a_loop_with_the_same_masks(make_private_trainer: TrainerFactory) -> None:
    config = lora(target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.2)
    module = OwnLossOfClasses(adapted(bert(), config))
    assert_equals_loop(make_private_trainer, module, texts(), together=True, tolerance=FLOAT32)


@renamed
def test_adapters_of_gpt2_equal_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    config = lora(target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    module = RecordLoss(adapted(gpt2(), config))
    assert_equals_loop(make_private_trainer, module, texts(language=True), tolerance=FLOAT32)


def test_adapters_that_run_on_something_else_than_records_are_refused(make_private_trainer: TrainerFactory) -> None:
    """DoRA multiplies its matrices by calling them on the rows of an identity."""
    module = Classifier(adapted(nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 3)), lora(use_dora=True)))
    assert_refused(make_private_trainer, module, labelled(40), "lora_A.default` (Linear) was given 40 rows for")


class BehindPrompt(RecordLoss):
    """Its model puts tokens of its own before the text."""

    def losses(self, batch: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]
        logits, labels = self.net(**inputs).logits[:, -labels.shape[1] : -1], labels[:, 1:]
        per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return per_token.sum(1) / (labels != -100).sum(1).clamp(min=1)


@renamed
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # likewise
def test_a_trained_prefix_equals_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    module = BehindPrompt(peft.get_peft_model(gpt2(), config))
    assert_equals_loop(make_private_trainer, module, texts(language=True), tolerance=FLOAT32)


@renamed
def test_a_trained_prompt_that_is_looked_up_once_and_repeated_is_refused(make_private_trainer: TrainerFactory) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    module = BehindPrompt(peft.get_peft_model(gpt2(), config))
    parts = "`net.prompt_encoder.default.embedding` was given one row of indices", "must not be repeated", "freeze it"
    assert_refused(make_private_trainer, module, texts(language=True), *parts)
