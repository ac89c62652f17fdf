"""Case 12: a metric that `training_step` updates works on empty batches and counts real records only."""

import pytest
from fixtures import Lit, Recorder, make_loader
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

SETTINGS = {"sampling_rate": 0.02, "insecure_seed": 12}


class LitWithMetrics(Lit):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3, average="micro")
        self.collection = MetricCollection({"macro": MulticlassAccuracy(num_classes=3), "mean": MeanMetric()})
        self.right, self.seen = 0, 0

    def training_step(self, batch, batch_idx):
        features, labels = batch
        logits = self(features)
        self.accuracy(logits, labels)
        self.collection["macro"].update(logits, labels)
        self.collection["mean"].update(labels.float())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if bool((features != 0).any()):
            self.right += int((logits.argmax(1) == labels).sum())
            self.seen += len(labels)
        return cross_entropy(logits, labels)


@pytest.fixture(scope="module")
def run(make_private_trainer):
    module, recorder = LitWithMetrics(), Recorder()
    trainer = make_private_trainer(max_epochs=1, strategy=SETTINGS, callbacks=[recorder])
    trainer.fit(module, make_loader())
    assert 0 in recorder.sizes
    return trainer, recorder, module


def test_training_runs_to_its_end(run):
    trainer, _, _ = run
    assert trainer.global_step == trainer.strategy.ledger.num_updates == 50


def test_logged_accuracy_is_that_of_the_real_records(run):
    trainer, recorder, module = run
    assert module.seen == sum(recorder.sizes)
    assert float(trainer.callback_metrics["accuracy"]) == pytest.approx(module.right / module.seen, abs=1e-6)


def test_state_of_a_metric_holds_real_records_only(run):
    _, recorder, module = run
    labels = [label for size, label in zip(recorder.sizes, recorder.labels, strict=True) if size > 0]
    total, count = sum(float(label.sum()) for label in labels), sum(map(len, labels))
    assert float(module.collection["mean"].compute()) == pytest.approx(total / count, abs=1e-6)
    macro = module.collection["macro"]
    assert int((macro.tp + macro.fn).sum()) == count
