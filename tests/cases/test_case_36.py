"""Case 36: what ties records of a batch together is refused before any update, naming where."""

import pytest
import torch
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import nn
from torch.nn import functional as F


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
