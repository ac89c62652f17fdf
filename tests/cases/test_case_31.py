"""Case 31: weights read by a functional, and layers that read their own, are refused by name before training."""

import pytest
from hand_loop import Classifier, assert_equals_loop, assert_refused, labelled
from torch import nn
from torch.nn import functional as F


class FunctionalNorm(nn.Module):
    def __init__(self, is_functional):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.is_functional = is_functional

    def forward(self, x):
        x = self.body(x)
        if self.is_functional:
            return self.head(F.layer_norm(x, (5,), self.norm.weight, self.norm.bias))
        return self.head(self.norm(x))


class Attention(nn.Module):
    """Four tokens that look at each other."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


def test_a_functional_layer_norm_is_refused_with_its_parameter(make_private_trainer):
    parts = "`net.norm.bias` is used outside the forward of module `net.norm` (LayerNorm)", "Call the module instead"
    assert_refused(make_private_trainer, Classifier(FunctionalNorm(True)), labelled(8), *parts)


def test_the_same_layer_norm_as_a_module_is_exact(make_private_trainer):
    assert_equals_loop(make_private_trainer, Classifier(FunctionalNorm(False)), labelled(8))


@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
def test_multihead_attention_is_refused_with_its_replacement(engine, make_private_trainer):
    message = assert_refused(
        make_private_trainer,
        Classifier(Attention()),
        labelled(4, 8),
        "PrivateStrategy(replace_unsupported=True)",
        strategy={"gradient_engine": engine},
    )
    if engine == "bookkeeping":
        assert "`net.attention.in_proj_bias`" in message
        assert "replace `net.attention`, with the same outputs" in message


@pytest.mark.parametrize("engine", ["bookkeeping", "hooks"])
def test_the_replacement_is_exact(engine, make_private_trainer):
    settings = {"gradient_engine": engine, "replace_unsupported": True}
    assert_equals_loop(make_private_trainer, Classifier(Attention()), labelled(4, 8), strategy=settings)
