"""Models of the transformers package, made from small configurations without a download."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from conftest import TrainerFactory
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

transformers = pytest.importorskip("transformers")

# Some of these models compute norms and softmaxes in float32, whatever the parameters are in.
FLOAT32 = 1e-5
LENGTH, VOCABULARY, CLASSES = 7, 30, 3

ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILLED = {
    "vocab_size": VOCABULARY,
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 16,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
DECODER = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def bert(**changes: Any) -> nn.Module:
    settings = {**ENCODER, **changes}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**settings)).train()


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(**ENCODER, pad_token_id=0)
    return transformers.RobertaForSequenceClassification(config).train()


def distilbert() -> nn.Module:
    return transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**DISTILLED)).train()


def gpt2(**changes: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**DECODER, **changes)).train()


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).train()


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).train()


def vit(**changes: Any) -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**{**VISION, **changes})).train()


def texts(*, language: bool = False, count: int = 18) -> list[dict[str, Tensor]]:
    """Padded texts of several lengths, with a label each or with their own tokens as labels."""
    generator = torch.Generator().manual_seed(0)
    records = []
    for _ in range(count):
        length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < length).long()
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator) * mask
        label = torch.randint(CLASSES, (), generator=generator)
        labels = torch.where(mask == 1, ids, -100) if language else label
        records.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return records


class OwnLoss(Classifier):
    """Trains on the loss that the model itself returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).loss  # type: ignore[no-any-return]


class OwnLossOfClasses(OwnLoss):
    """Its loss record by record, for models with dropout."""

    def losses(self, batch: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return F.cross_entropy(self.net(**inputs).logits, batch["labels"], reduction="none")


class RecordLoss(Classifier):
    """A language model with the mean over the tokens of each record as loss."""

    def losses(self, batch: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits, labels = self.net(**inputs).logits[:, :-1], batch["labels"][:, 1:]
        per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return per_token.sum(1) / (labels != -100).sum(1).clamp(min=1)


class Translation(Classifier):
    """The same for a model with a decoder of its own, whose labels are not shifted."""

    def losses(self, batch: Any) -> Tensor:
        logits, labels = self.net(**batch).logits, batch["labels"]
        per_token = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return per_token.sum(1) / (labels != -100).sum(1).clamp(min=1)


class Images(Classifier):
    def losses(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(pixel_values=batch[0]).logits, batch[1], reduction="none")


# All but RoBERTa look up positions once for the batch.
CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "BERT": bert,
    "BERT with eager attention": lambda: bert(attn_implementation="eager"),
    "DistilBERT": distilbert,
    "RoBERTa": roberta,
}


@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("make_net", CLASSIFIERS.values(), ids=CLASSIFIERS.keys())
def test_a_classifier_of_texts_with_its_own_loss_equals_a_loop(
    make_net: Callable[[], nn.Module], engine: str, make_private_trainer: TrainerFactory
) -> None:
    strategy = {"gradient_engine": engine}
    assert_equals_loop(make_private_trainer, OwnLoss(make_net()), texts(), strategy=strategy, tolerance=FLOAT32)


def test_a_classifier_with_dropout_equals_a_loop_with_the_same_masks(make_private_trainer: TrainerFactory) -> None:
    module = OwnLossOfClasses(bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
    assert_equals_loop(make_private_trainer, module, texts(), together=True, tolerance=FLOAT32)


def test_a_batch_encoding_is_a_batch(make_private_trainer: TrainerFactory) -> None:
    kinds = []

    class Watching(OwnLoss):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            kinds.append(type(batch))
            return super().training_step(batch, batch_idx)

    def collate(records: Sequence[Mapping[str, Tensor]]) -> Any:
        return transformers.BatchEncoding(default_collate([*records]))

    assert_equals_loop(make_private_trainer, Watching(bert()), texts(), collate_fn=collate, tolerance=FLOAT32)
    assert set(kinds) == {transformers.BatchEncoding}


def test_positions_may_be_frozen(make_private_trainer: TrainerFactory) -> None:
    net = distilbert()
    net.distilbert.embeddings.position_embeddings.requires_grad_(False)  # type: ignore[union-attr,operator]
    assert_equals_loop(make_private_trainer, OwnLoss(net), texts(), tolerance=FLOAT32)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_causal_language_model_with_a_mean_for_each_record_equals_a_loop(
    attention: str, make_private_trainer: TrainerFactory
) -> None:
    """Its head is its embedding, and its products are of the kind `Conv1D`, which is the package's own."""
    module = RecordLoss(gpt2(attn_implementation=attention))
    assert_equals_loop(make_private_trainer, module, texts(language=True), tolerance=FLOAT32)


def test_the_own_loss_of_a_causal_language_model_is_refused(make_private_trainer: TrainerFactory) -> None:
    """A mean over the tokens of a padded batch: how much one text counts depends on how long the others are."""
    parts = "`net.", "depends on the ", "no mean over tokens"
    assert_refused(make_private_trainer, OwnLoss(gpt2()), texts(language=True), *parts)


def test_rotary_positions_equal_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, RecordLoss(llama()), texts(language=True), tolerance=FLOAT32)


def test_a_table_of_relative_positions_is_refused(make_private_trainer: TrainerFactory) -> None:
    parts = "relative_attention_bias.weight` has 7 gradient rows for", "freeze"
    assert_refused(make_private_trainer, Translation(t5()), texts(language=True), *parts)


def test_a_translator_with_frozen_relative_positions_equals_a_loop(make_private_trainer: TrainerFactory) -> None:
    net = t5()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    assert_equals_loop(make_private_trainer, Translation(net), texts(language=True), tolerance=FLOAT32)


def test_a_vision_transformer_equals_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    assert_equals_loop(make_private_trainer, Images(vit()), labelled(1, 8, 8), tolerance=FLOAT32)


def test_dropout_beside_the_class_token_of_a_vision_transformer_is_refused(
    make_private_trainer: TrainerFactory,
) -> None:
    parts = "`net.vit.embeddings` (ViTEmbeddings)", "draws random numbers (dropout)", "or freeze them"
    assert_refused(make_private_trainer, Images(vit(hidden_dropout_prob=0.1)), labelled(1, 8, 8), *parts)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # transformers', of a newer name
def test_gradient_checkpointing_equals_a_loop_over_records(make_private_trainer: TrainerFactory) -> None:
    net = bert()
    net.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    assert_equals_loop(make_private_trainer, OwnLoss(net), texts(), tolerance=FLOAT32)
