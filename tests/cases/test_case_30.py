"""Case 30: a parameter of the LightningModule itself, used in `forward` or only in `training_step`."""

import pytest
import torch
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import nn
from torch.nn import functional as F


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.temp = nn.Parameter(torch.tensor(2.0))

    def forward(self, logits):
        return logits / self.temp


class Tempered(Classifier):
    """Divides its logits by a trained temperature."""

    def __init__(self):
        super().__init__(nn.Linear(8, 3))
        self.temp = nn.Parameter(torch.tensor(2.0))


class InTrainingStep(Tempered):
    def losses(self, batch):
        return F.cross_entropy(self(batch[0]) / self.temp, batch[1], reduction="none")


class InListOfTrainingStep(Classifier):
    """Its temperature is in a list of parameters."""

    def __init__(self):
        super().__init__(nn.Linear(8, 3))
        self.temps = nn.ParameterList([torch.tensor(2.0)])

    def losses(self, batch):
        return F.cross_entropy(self(batch[0]) / self.temps[0], batch[1], reduction="none")


class InForward(Tempered):
    def forward(self, features):
        return self.net(features) / self.temp


class InModule(Classifier):
    def __init__(self):
        super().__init__(nn.Linear(8, 3))
        self.scale = Scale()

    def losses(self, batch):
        return F.cross_entropy(self.scale(self(batch[0])), batch[1], reduction="none")


@pytest.mark.parametrize(("kind", "name"), [(InTrainingStep, "temp"), (InListOfTrainingStep, "temps.0")])
def test_a_parameter_used_in_training_step_is_an_error_that_says_where_to_move_it(kind, name, make_private_trainer):
    parts = (
        f"`{name}` is a parameter of {kind.__name__} itself",
        "`training_step`",
        f"Move `{name}` into a small module",
    )
    assert_refused(make_private_trainer, kind(), labelled(8), *parts)


def test_the_move_that_the_error_asks_for_is_exact(make_private_trainer):
    assert_equals_loop(make_private_trainer, InModule(), labelled(8))


@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
def test_a_single_number_used_in_forward_is_exact(engine, make_private_trainer):
    assert_equals_loop(make_private_trainer, InForward(), labelled(8), strategy={"gradient_engine": engine})
