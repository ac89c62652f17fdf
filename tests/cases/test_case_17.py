"""Case 17: streams are refused with alternatives; beside private records, public ones pass through unbooked."""

import pytest
import torch
from fixtures import Lit, make_loader, make_records
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_dp
from lightning_dp import PublicDataLoader
from lightning_dp.errors import UnsupportedDataError, UnsupportedModelError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(make_records())


class WithPrototypes(Lit):
    """Pulls logits towards those of public prototypes, which are looked at without gradient."""

    def __init__(self):
        super().__init__()
        self.prototypes = []

    def training_step(self, batch, batch_idx):
        (features, labels), (prototypes,) = batch["patients"], batch["prototypes"]
        self.prototypes.append(prototypes)
        with torch.no_grad():
            target = self(prototypes).mean(0, keepdim=True)
        logits = self(features)
        return (F.cross_entropy(logits, labels, reduction="none") + ((logits - target) ** 2).sum(1)).mean()


class TrainedOnBoth(WithPrototypes):
    def training_step(self, batch, batch_idx):
        (features, labels), (prototypes,) = batch["patients"], batch["prototypes"]
        return F.cross_entropy(self(features), labels) + self(prototypes).square().mean()


def public(count=10, batch_size=5, **settings):
    return PublicDataLoader(TensorDataset(torch.arange(count * 8.0).view(count, 8) / 80), batch_size, **settings)


def test_a_stream_is_refused_with_alternatives(make_private_trainer):
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedDataError, match=r"`Stream` streams its records.*load the stream into a list"):
        trainer.fit(Lit(), DataLoader(Stream(), batch_size=16))
    assert trainer.strategy.ledger.num_updates == 0


@pytest.mark.parametrize(
    ("mode", "prototypes", "updates"),
    [("max_size_cycle", 10, 8), ("max_size_cycle", 45, 18), ("min_size", 10, 4), ("min_size", 45, 8)],
)
def test_public_batches_pass_through_and_only_private_ones_are_booked(mode, prototypes, updates, make_private_trainer):
    trainer, module = make_private_trainer(), WithPrototypes()
    trainer.fit(module, CombinedLoader({"patients": make_loader(), "prototypes": public(prototypes)}, mode))
    seen = module.prototypes[-updates:]
    whole = public(prototypes).dataset.tensors[0]
    for i, batch in enumerate(seen):
        start = 5 * (i % (updates // 2)) % prototypes  # an epoch starts both from their beginning
        assert torch.equal(batch, whole[start : start + 5])
    entry = trainer.strategy.ledger.entries
    assert trainer.global_step == updates
    assert [(e.count, e.mechanism.sampling_rate) for e in entry] == [(updates, 0.25)]


def test_updates_are_those_of_the_private_records_alone(make_private_trainer):
    """A public loader that is not used changes nothing."""

    class Beside(Lit):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["patients"], batch_idx)

    ends = []
    for kind, data in ((Lit, make_loader()), (Beside, {"patients": make_loader(), "prototypes": public()})):
        torch.manual_seed(0)
        module = kind()
        make_private_trainer(strategy={"insecure_seed": 3}, accumulate_grad_batches=2).fit(module, data)
        ends.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*ends)


def test_the_statements_say_what_is_not_protected(make_private_trainer, capsys):
    trainer = make_private_trainer(callbacks=[lightning_dp.PrivacyMonitor(delta=1e-5)])
    trainer.fit(WithPrototypes(), {"patients": make_loader(), "prototypes": public()})
    assert capsys.readouterr().out.count("10 records of a PublicDataLoader, not protected") == 2


def test_one_private_loader_in_a_list_is_one_private_loader(make_private_trainer):
    class First(Lit):
        def training_step(self, batch, batch_idx):
            (only,) = batch
            return super().training_step(only, batch_idx)

    trainer = make_private_trainer()
    trainer.fit(First(), [make_loader()])
    assert trainer.strategy.ledger.num_updates == trainer.global_step == 8


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"patients": make_loader(), "prototypes": make_loader()}, id="undeclared"),
        pytest.param({"patients": public(), "prototypes": public()}, id="none-private"),
        pytest.param(public(), id="public-alone"),
    ],
)
def test_all_loaders_but_one_must_be_declared_public(data, make_private_trainer):
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedDataError, match=r"PublicDataLoader"):
        trainer.fit(WithPrototypes(), data)
    assert trainer.strategy.ledger.num_updates == 0


@pytest.mark.parametrize("mode", ["sequential", "max_size"])
def test_batches_without_private_records_are_refused(mode, make_private_trainer):
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedDataError, match=rf"mode='{mode}'.*'min_size', 'max_size_cycle'"):
        trainer.fit(WithPrototypes(), CombinedLoader({"patients": make_loader(), "prototypes": public()}, mode))


def test_a_public_stream_needs_an_end_of_the_epoch(make_private_trainer):
    class PublicStream(IterableDataset):
        def __iter__(self):
            return iter(public(count=500).dataset)

    data = {"patients": make_loader(), "prototypes": PublicDataLoader(PublicStream(), 5)}
    with pytest.raises(UnsupportedDataError, match="set `limit_train_batches`"):
        make_private_trainer().fit(WithPrototypes(), data)
    trainer = make_private_trainer(limit_train_batches=3)
    trainer.fit(WithPrototypes(), data)
    assert trainer.strategy.ledger.num_updates == trainer.global_step == 6


def test_training_on_public_records_too_is_refused(make_private_trainer):
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedModelError, match="public") as error:
        trainer.fit(TrainedOnBoth(), {"patients": make_loader(), "prototypes": public()})
    assert "torch.no_grad" in str(error.value)
    assert trainer.strategy.ledger.num_updates == 0
