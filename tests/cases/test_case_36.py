"""Case 36: what ties records of a batch together is refused before any update, naming where."""

import pytest
import torch
from fixtures import Lit, make_loader
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import Ledger
from lightning_dp.errors import UnsupportedModelError


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class Contrastive(Classifier):
    """Each record is to be told apart from the others of its batch."""

    def training_step(self, batch, batch_idx):
        found = F.normalize(self(batch[0]), dim=1)
        return F.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


class RunningMean(nn.Module):
    """Subtracts a running mean of what it has seen."""

    def __init__(self, persistent, in_place):
        super().__init__()
        self.layer, self.in_place = nn.Linear(8, 3), in_place
        self.register_buffer("mean", torch.zeros(8), persistent=persistent)

    def forward(self, x):
        if self.training and self.in_place:
            self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        elif self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.layer(x - self.mean)


def test_features_centred_by_their_batch_are_refused(make_private_trainer):
    message = assert_refused(make_private_trainer, Classifier(Centred()), labelled(8), "`net.layer.weight` depends on")
    assert "no batch statistics" in message


def test_a_contrastive_loss_is_refused(make_private_trainer):
    message = assert_refused(make_private_trainer, Contrastive(nn.Linear(8, 6)), labelled(8), "depends on", "`net.")
    assert "no contrastive" in message


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_running_mean_is_refused_with_its_buffer(persistent, in_place, make_private_trainer):
    module = Classifier(RunningMean(persistent, in_place))
    parts = "`net.mean` is changed by `training_step` itself", "Keep it fixed"
    assert_refused(make_private_trainer, module, labelled(8), *parts)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # Lightning's hint; here it is intended
def test_a_mean_that_is_kept_fixed_is_exact(make_private_trainer):
    module = Classifier(RunningMean(persistent=True, in_place=True))
    module.net.mean += 0.5
    module.net.eval()
    assert_equals_loop(make_private_trainer, module, labelled(8))


@pytest.mark.parametrize(
    ("make", "stamp"),
    [
        (lambda: Classifier(Centred()), "the gradient of one record for `net.layer.weight` depends on"),
        (lambda: Contrastive(nn.Linear(8, 6)), "depends on"),
        (
            lambda: Classifier(RunningMean(persistent=True, in_place=True)),
            "`net.mean` is changed by `training_step` itself",
        ),
        (
            lambda: Classifier(RunningMean(persistent=False, in_place=False)),
            "`net.mean` is changed by `training_step` itself",
        ),
    ],
    ids=["centred", "contrastive", "buffer-in-place", "buffer-replaced"],
)
@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
def test_whoever_insists_trains_with_a_stamp_on_the_guarantee(make, stamp, engine, make_private_trainer, tmp_path):
    strategy = {"allow_mixed_records": True, "gradient_engine": engine}
    trainer = make_private_trainer(strategy=strategy)
    module = make()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.warns(UserWarning, match="without a guarantee"):
        trainer.fit(module, DataLoader(labelled(8), 6))
    assert trainer.strategy.ledger.num_updates == trainer.global_step > 0
    assert any(not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))
    guarantee = trainer.strategy.guarantee
    assert not guarantee.is_private
    assert any(stamp.lower() in text.lower() for text in guarantee.stamps)
    assert "NOT VALID AS STATED: records mix" in str(guarantee)

    trainer.save_checkpoint(tmp_path / "mixed.ckpt")
    ledger = Ledger()
    ledger.merge(torch.load(tmp_path / "mixed.ckpt", weights_only=True)["lightning_dp"]["ledger"])
    assert ledger.stamps == guarantee.stamps


def test_whoever_insists_for_nothing_gets_no_stamp(make_private_trainer):
    trainer = make_private_trainer(strategy={"allow_mixed_records": True})
    trainer.fit(Lit(), make_loader())
    assert trainer.strategy.guarantee.is_private


class Dropping(Classifier):
    """Leaves out the hard records."""

    def training_step(self, batch, batch_idx):
        keep = torch.arange(len(batch[1])) % 2 == 0
        return F.cross_entropy(self(batch[0][keep]), batch[1][keep])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Dropping(nn.Linear(8, 3)), "gradient rows for"),
        (lambda: Classifier(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))), "BatchNorm1d"),
    ],
    ids=["rows", "batchnorm"],
)
def test_what_cannot_be_clipped_at_all_stays_refused(make, match, make_private_trainer):
    trainer = make_private_trainer(strategy={"allow_mixed_records": True})
    with pytest.raises(UnsupportedModelError, match=match):
        trainer.fit(make(), DataLoader(labelled(8), 6))
    assert trainer.strategy.ledger.num_updates == 0
