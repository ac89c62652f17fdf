"""Case 29: an unused parameter gets noise and one warning; a used one whose rows are unseen is an error."""

import copy
import warnings

import pytest
import torch
from fixtures import Lit, make_loader
from scipy import stats
from torch import nn
from torch.nn import functional

from lightning_dp.errors import UnsupportedModelError

FALSE_ALARM = 1e-6


class LitWithUnused(Lit):
    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(8, 3)


class LitWithWeightRead(Lit):
    """Uses a weight outside the forward of its layer, from the update number ``since`` on."""

    since = 0

    def forward(self, features):
        head = self.net[2]
        hidden = self.net[1](self.net[0](features))
        if self.global_step >= self.since:
            return functional.linear(hidden, head.weight, head.bias)
        return head(hidden)


class LitWithWeightReadLater(LitWithWeightRead):
    since = 2


class LitWithWeightReadTwice(Lit):
    """Uses a weight both inside and outside the forward of its layer."""

    def forward(self, features):
        hidden = self.net[1](self.net[0](features))
        return self.net[2](hidden) + functional.linear(hidden, self.net[2].weight)


def fit(make_private_trainer, module, noise_multiplier):
    trainer = make_private_trainer(strategy={"noise_multiplier": noise_multiplier})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, make_loader())
    assert trainer.strategy.ledger.num_updates == 8
    return [str(warning.message) for warning in caught if "aux" in str(warning.message)]


def test_unused_parameter_moves_by_noise_only(make_private_trainer):
    module = LitWithUnused()
    before = copy.deepcopy(module.aux.state_dict())
    fit(make_private_trainer, module, noise_multiplier=0.0)
    assert all(torch.equal(value, before[name]) for name, value in module.aux.state_dict().items())
    fit(make_private_trainer, module, noise_multiplier=1.0)
    assert not any(torch.equal(value, before[name]) for name, value in module.aux.state_dict().items())


def test_noise_of_an_unused_parameter_has_the_declared_deviation(make_private_trainer):
    module = LitWithUnused()
    before = copy.deepcopy(module.aux)
    fit(make_private_trainer, module, noise_multiplier=50.0)
    moved = torch.cat(
        [(p - q).detach().flatten() for p, q in zip(module.aux.parameters(), before.parameters(), strict=True)]
    )
    # Eight SGD steps at lr 0.1, each with noise 50 / 16.
    expected = 0.1 * 50 / 16 * 8**0.5
    total = float(((moved / expected).double() ** 2).sum())
    tail = min(stats.chi2(len(moved)).cdf(total), stats.chi2(len(moved)).sf(total))
    assert 2 * tail > FALSE_ALARM


def test_one_warning_names_the_unused_parameters(make_private_trainer):
    (message,) = fit(make_private_trainer, LitWithUnused(), noise_multiplier=1.0)
    assert "`aux.weight`" in message
    assert "`aux.bias`" in message
    assert "Freeze" in message
    assert "net" not in message


def test_frozen_unused_parameter_gets_no_noise_and_no_warning(make_private_trainer):
    module = LitWithUnused()
    module.aux.requires_grad_(False)
    before = copy.deepcopy(module.aux.state_dict())
    assert fit(make_private_trainer, module, noise_multiplier=1.0) == []
    assert all(torch.equal(value, before[name]) for name, value in module.aux.state_dict().items())


@pytest.mark.parametrize(
    ("module", "updates"), [(LitWithWeightRead, 0), (LitWithWeightReadTwice, 0), (LitWithWeightReadLater, 2)]
)
def test_gradient_without_rows_is_an_error_with_path_and_cause(make_private_trainer, module, updates):
    trainer = make_private_trainer()
    with pytest.raises(UnsupportedModelError, match=r"outside the forward|exactly one forward") as error:
        trainer.fit(module(), make_loader())
    assert "`net.2." in str(error.value)
    assert "Call the module instead of reading its parameter" in str(error.value)
    assert trainer.strategy.ledger.num_updates == updates


def test_refused_update_changes_nothing(make_private_trainer):
    module = LitWithWeightReadLater()
    module.since = 0
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UnsupportedModelError):
        make_private_trainer().fit(module, make_loader())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
