"""Case 32: adapters (LoRA) in a frozen module: exactly A and B move, and nothing is kept or drawn for the rest."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from hand_loop import Classifier, assert_equals_loop, labelled
from torch import nn
from torch.utils.data import DataLoader


class LoRA(nn.Module):
    """A frozen linear layer with a trained correction of rank 2."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.b(self.a(x))


def make_module():
    """Has adapters in both layers."""
    return Classifier(nn.Sequential(LoRA(nn.Linear(8, 16)), nn.Tanh(), LoRA(nn.Linear(16, 3))))


ADAPTERS = {"net.0.a.weight", "net.0.b.weight", "net.2.a.weight", "net.2.b.weight"}


class Sums(pl.Callback):
    """Keeps which parameters have a share in the sum and the noise of an update, and which layers are watched."""

    def __init__(self):
        self.summed, self.watched = set(), set()

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.watched |= {path for path, layer in pl_module.named_modules() if layer._forward_hooks}

    def on_before_optimizer_step(self, trainer, *_):
        self.summed |= set(trainer.strategy.run.gradients.parameters)


def test_adapters_equal_a_loop_over_records(make_private_trainer):
    assert_equals_loop(make_private_trainer, make_module(), labelled(8))


def moved_and_cast():
    """Brought to another device, to double precision and to float32 again after construction."""
    module = make_module().to("meta").to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double().float()


@pytest.mark.parametrize("make", [make_module, moved_and_cast])
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_exactly_the_adapters_move(make, precision, make_private_trainer):
    module = make()
    before = copy.deepcopy(module.state_dict())
    trainer = make_private_trainer(max_steps=2, precision=precision)
    trainer.fit(module, DataLoader(labelled(8), batch_size=6, shuffle=True))
    same = {name for name, value in module.state_dict().items() if torch.equal(value, before[name].to(value.dtype))}
    assert set(before) - same == ADAPTERS
    assert trainer.strategy.ledger.num_updates == trainer.global_step == 2


def test_the_frozen_layers_have_no_share_of_noise_and_memory(make_private_trainer):
    module, sums = make_module(), Sums()
    make_private_trainer(max_steps=2, callbacks=[sums]).fit(module, DataLoader(labelled(8), batch_size=6, shuffle=True))
    assert sums.summed == ADAPTERS
    assert sums.watched == {name.removesuffix(".weight") for name in ADAPTERS}
    assert all(module.get_parameter(name).grad is None for name in set(module.state_dict()) - ADAPTERS)


class Mixed(LoRA):
    """Its frozen layer was cast to bfloat16 after construction, the trained ones were not."""

    def forward(self, x):
        return self.layer(x.bfloat16()).float() + self.b(self.a(x))


def test_a_frozen_layer_of_another_type_stays_exact(make_private_trainer):
    module = Classifier(nn.Sequential(Mixed(nn.Linear(8, 8)), nn.Linear(8, 3)))
    module.net[0].layer.to(torch.bfloat16)
    assert_equals_loop(make_private_trainer, module, labelled(8), precision="32-true", tolerance=1e-5)
    assert module.net[0].layer.weight.dtype == torch.bfloat16
