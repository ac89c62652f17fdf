import copy
import importlib.util
import json
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    register_accountant,
)
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dp as ldp
from lightning_dp.errors import InvalidValueError, PrivacyViolationError
from lightning_dp.integrations import ContourAccountant
from lightning_dp.integrations import opacus as integration

# Third parties: torch about Opacus' hooks on first layers, and Opacus about its generator and unused orders.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning"),
]
STEP = ldp.PoissonSampled(ldp.Gaussian(1.0), 0.01)


def stepped(accountant, count, noise_multiplier=1.0, sample_rate=0.01):
    for _ in range(count):
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    return accountant


def made_private(**settings):
    """An engine with its private model, optimizer and loader over 20 records in batches of 5."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    engine = PrivacyEngine(accountant="contour")
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20, 1)), batch_size=5),
        noise_multiplier=1.5,
        max_grad_norm=1.0,
        **settings,
    )
    return engine, *private


def train(model, optimizer, loader, batches_per_update=1):
    for number, (inputs, targets) in enumerate(loader, start=1):
        nn.functional.mse_loss(model(inputs), targets).backward()
        if number % batches_per_update == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_opacus_finds_it_by_name():
    assert isinstance(create_accountant("contour"), ContourAccountant)
    assert PrivacyEngine(accountant="contour").accountant.mechanism() == "contour"
    assert issubclass(ContourAccountant, IAccountant)


def test_importing_again_does_not_raise():
    specification = importlib.util.find_spec(integration.__name__)
    again = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(again)
        assert isinstance(create_accountant("contour"), again.ContourAccountant)
    finally:
        register_accountant("contour", ContourAccountant, force=True)


def test_a_run_of_opacus_is_booked_and_read_out_exactly():
    engine, *run = made_private()
    train(*run)
    train(*run)
    assert engine.accountant.history == [(1.5, 0.25, 8)]
    expected = (8 * ldp.PoissonSampled(ldp.Gaussian(1.5), 0.25)).epsilon(1e-5)
    assert engine.get_epsilon(1e-5) == expected
    prv = PRVAccountant()
    prv.history = engine.accountant.history
    assert expected == pytest.approx(prv.get_epsilon(1e-5), abs=0.02)


@pytest.mark.parametrize("peer", [RDPAccountant, PRVAccountant])
def test_the_history_is_that_of_opacus(peer):
    both = ContourAccountant(), peer()
    for accountant in both:
        stepped(stepped(stepped(accountant, 3), 2, noise_multiplier=0.9), 1)
    assert both[0].history == both[1].history == [(1.0, 0.01, 3), (0.9, 0.01, 2), (1.0, 0.01, 1)]
    assert len(both[0]) == len(both[1]) == 3


def test_epsilon_is_that_of_the_history_in_any_order():
    accountant = stepped(stepped(stepped(ContourAccountant(), 3), 2, noise_multiplier=0.9), 1)
    assert accountant.composition() == 4 * STEP + 2 * ldp.PoissonSampled(ldp.Gaussian(0.9), 0.01)
    assert accountant.get_epsilon(1e-5) == accountant.composition().epsilon(1e-5)


def test_a_booked_update_costs_the_same_however_many_there_were():
    accountant = ContourAccountant()
    accountant.history = [(1.0, 0.01, 10**9)]
    stepped(accountant, 5)
    assert accountant.history == [(1.0, 0.01, 10**9 + 5)]


def test_nothing_spent_is_epsilon_zero():
    assert ContourAccountant().get_epsilon(1e-5) == 0
    assert len(ContourAccountant()) == 0


def test_no_noise_is_epsilon_infinity():
    assert stepped(ContourAccountant(), 1, noise_multiplier=0.0).get_epsilon(1e-5) == math.inf


def test_full_batches_are_the_plain_gaussian():
    accountant = stepped(ContourAccountant(), 4, noise_multiplier=20.0, sample_rate=1)
    assert accountant.get_epsilon(1e-5) == (4 * ldp.Gaussian(20.0)).epsilon(1e-5)


@pytest.mark.parametrize(("steps", "counted"), [(1000.0, 1000), (np.int64(7), 7), (2.1, 3), (0, 0)])
def test_steps_that_are_no_integers_are_rounded_up(steps, counted):
    accountant = ContourAccountant()
    accountant.history = [(1.0, 0.01, steps)]
    assert accountant.composition() == counted * STEP


@pytest.mark.parametrize("entry", [(-1.0, 0.01), (1.0, 1.2), (1.0, 0.0), (math.nan, 0.01), ("1", 0.01)])
def test_an_impossible_update_is_refused_when_it_is_booked(entry):
    with pytest.raises(InvalidValueError):
        stepped(ContourAccountant(), 1, *entry)


@pytest.mark.parametrize("steps", [-1, math.nan, math.inf, "10"])
def test_an_impossible_count_is_refused_when_it_is_read(steps):
    accountant = ContourAccountant()
    accountant.history = [(1.0, 0.01, steps)]
    with pytest.raises(InvalidValueError, match="steps"):
        accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, "1e-5"])
def test_delta_is_checked(delta):
    with pytest.raises(InvalidValueError, match="delta"):
        stepped(ContourAccountant(), 1).get_epsilon(delta)


def test_settings_of_other_accountants_and_optimizers_change_nothing():
    accountant = stepped(ContourAccountant(), 10)
    settings = {"alphas": [2, 3], "eps_error": 0.1, "delta_error": 1e-9, "target_unclipped_quantile": 0.5}
    assert accountant.get_epsilon(1e-5, poisson=True, **settings) == accountant.get_epsilon(delta=1e-5)


def test_batches_that_are_not_poisson_sampled_are_refused():
    with pytest.raises(InvalidValueError, match="poisson_sampling=True"):
        stepped(ContourAccountant(), 10).get_epsilon(1e-5, poisson=False)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda state: json.loads(json.dumps(state))])
def test_a_saved_state_goes_on_where_it_was(through):
    accountant = stepped(ContourAccountant(), 3)
    state = through(accountant.state_dict())
    resumed = ContourAccountant()
    resumed.load_state_dict(state)
    assert stepped(resumed, 2).history == [(1.0, 0.01, 5)]
    assert [tuple(entry) for entry in state["history"]] == [(1.0, 0.01, 3)]
    assert accountant.history == [(1.0, 0.01, 3)]


def test_a_state_is_written_into_a_given_mapping():
    destination = {"other": 1}
    assert stepped(ContourAccountant(), 3).state_dict(destination) is destination
    assert destination == {"other": 1, "history": [(1.0, 0.01, 3)], "mechanism": "contour"}


def test_a_checkpoint_of_the_engine_restores_what_was_spent(tmp_path):
    engine, model, optimizer, loader = made_private()
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    later, model, optimizer, loader = made_private()
    later.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    assert later.accountant.history == [(1.5, 0.25, 8)]


@pytest.mark.parametrize("state", [None, {}, {"mechanism": "contour"}, {"history": []}])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match="state"):
        ContourAccountant().load_state_dict(state)


def test_a_state_of_another_accountant_is_refused_and_its_history_welcome():
    rdp = stepped(RDPAccountant(), 1000)
    accountant = ContourAccountant()
    with pytest.raises(ValueError, match="rdp"):
        accountant.load_state_dict(rdp.state_dict())
    accountant.history = list(rdp.history)
    assert accountant.get_epsilon(1e-5) == (1000 * STEP).epsilon(1e-5)
    stepped(accountant, 1)
    assert rdp.history == [(1.0, 0.01, 1000)]


def test_another_accountant_takes_its_history():
    prv = PRVAccountant()
    prv.history = list(stepped(ContourAccountant(), 1000).history)
    assert prv.get_epsilon(1e-5) == pytest.approx(1.8282366667, abs=0.02)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_are_independent(clone):
    accountant = stepped(ContourAccountant(), 3)
    other = stepped(clone(accountant), 1)
    assert (accountant.history, other.history) == ([(1.0, 0.01, 3)], [(1.0, 0.01, 4)])


@pytest.mark.parametrize("target", [1.0, 8.0])
def test_opacus_calibrates_with_it_to_the_target(target):
    sigma = get_noise_multiplier(
        target_epsilon=target,
        target_delta=1e-5,
        sample_rate=0.01,
        steps=1000,
        accountant="contour",
        epsilon_tolerance=1e-4,
    )
    assert target - 1e-4 <= (1000 * ldp.PoissonSampled(ldp.Gaussian(sigma), 0.01)).epsilon(1e-5) <= target
    own = ldp.calibrate_noise_multiplier(epsilon=target, delta=1e-5, sampling_rate=0.01, num_updates=1000)
    assert sigma == pytest.approx(own, rel=1e-3)


def test_it_reaches_targets_that_the_order_grid_of_rdp_excludes():
    arguments = {"target_epsilon": 0.1, "target_delta": 1e-5, "sample_rate": 0.01, "steps": 10}
    with pytest.raises(ValueError, match="too low"):
        get_noise_multiplier(accountant="rdp", **arguments)
    assert get_noise_multiplier(accountant="contour", **arguments) > 0


def test_make_private_with_epsilon_keeps_the_target():
    model = nn.Linear(2, 1)
    engine = PrivacyEngine(accountant="contour")
    run = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(20, 2), torch.randn(20, 1)), batch_size=5),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
    )
    train(*run)
    train(*run)
    assert 1.98 < engine.get_epsilon(1e-3) <= 2.0


def test_an_update_that_sums_several_batches_is_refused_before_it_is_made():
    engine, model, optimizer, loader = made_private()
    model.allow_grad_accumulation()
    before = model.state_dict()["_module.weight"].clone()
    with pytest.raises(PrivacyViolationError, match="2 batches"):
        train(model, optimizer, loader, batches_per_update=2)
    assert torch.equal(model.state_dict()["_module.weight"], before)
    assert engine.accountant.history == []


def test_a_batch_in_physical_pieces_is_one_update():
    engine, model, optimizer, loader = made_private()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as pieces:
        train(model, optimizer, pieces)
    assert engine.accountant.history == [(1.5, 0.25, 4)]


def test_the_hook_is_called_by_the_optimizer_of_opacus():
    accountant = ContourAccountant()
    parameter = nn.Parameter(torch.zeros(2))
    inner = torch.optim.SGD([parameter], lr=0.1)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(0.5))
    parameter.grad_sample = torch.ones(3, 2)
    optimizer.step()
    assert accountant.history == [(1.0, 0.5, 1)]


def test_epsilon_is_below_rdp_and_above_gdp_as_it_should():
    history = [(1.0, 0.01, 1000)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peers = RDPAccountant(), GaussianAccountant()
    accountants = ContourAccountant(), *peers
    for accountant in accountants:
        accountant.history = history
    exact, rdp, gdp = (accountant.get_epsilon(1e-5) for accountant in accountants)
    assert gdp < exact < rdp
