import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_dp.accounting.mechanisms import (
    Composition,
    Gaussian,
    Mechanism,
    PoissonSampled,
    mechanism_from_dict,
)
from lightning_dp.errors import InvalidValueError, LedgerError

STEP = PoissonSampled(Gaussian(1.0), 0.01)
OTHER = Gaussian(20.0)

gaussians = st.builds(Gaussian, st.floats(0, 1e6))
singles = gaussians | st.builds(PoissonSampled, gaussians, st.floats(1e-9, 1))
compositions = st.builds(Composition, st.lists(st.tuples(singles, st.integers(0, 10**6))).map(tuple))


def test_adding_a_mechanism_to_itself_counts_it():
    assert (STEP + STEP).phases == ((STEP, 2),)


def test_multiplication_equals_repeated_addition():
    assert 3 * STEP == STEP + STEP + STEP == STEP * 3


def test_composition_is_equal_in_any_order():
    assert STEP + OTHER == OTHER + STEP
    assert hash(STEP + OTHER) == hash(OTHER + STEP)


def test_composition_of_compositions_is_flat():
    assert Composition(((STEP, 3), (OTHER, 6))) == 2 * (STEP + 3 * OTHER) + STEP


def test_numpy_integers_count_as_whole_numbers():
    assert np.int64(4) * STEP == 4 * STEP


def test_different_compositions_are_unequal():
    assert 2 * STEP != 3 * STEP
    assert 2 * STEP != "2 * STEP"


def test_empty_composition_costs_nothing():
    empty = 0 * STEP
    assert empty == Composition()
    assert empty.epsilon(1e-5) == 0
    assert empty.delta(0.0) == 0


def test_no_noise_means_no_privacy():
    for mechanism in (Gaussian(0.0), PoissonSampled(Gaussian(0.0), 0.01), 5 * STEP + Gaussian(0)):
        assert mechanism.epsilon(1e-5) == math.inf
        assert mechanism.delta(10.0) == 1


def test_mechanisms_are_frozen():
    with pytest.raises(AttributeError):
        STEP.sampling_rate = 0.5


@given(singles | compositions)
def test_plain_data_round_trip_through_json_is_exact(mechanism: Mechanism):
    assert mechanism_from_dict(json.loads(json.dumps(mechanism.to_dict()))) == mechanism


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "gaussian",
        {},
        {"kind": "geometric", "noise_multiplier": 1.0},
        {"kind": ["gaussian"]},
        {"kind": "gaussian"},
        {"kind": "poisson_sampled", "sampling_rate": 0.1},
        {"kind": "poisson_sampled", "sampling_rate": 0.1, "mechanism": {"kind": "composition", "parts": []}},
        {"kind": "composition"},
        {"kind": "composition", "parts": 3},
        {"kind": "composition", "parts": [3]},
        {"kind": "composition", "parts": [{"mechanism": {"kind": "gaussian", "noise_multiplier": 1.0}}]},
        {"kind": "composition", "parts": [{"mechanism": {"kind": "composition", "parts": []}, "count": 1}]},
    ],
)
def test_stored_garbage_is_a_ledger_error(data):
    with pytest.raises(LedgerError):
        mechanism_from_dict(data)


@pytest.mark.parametrize("value", ["1.0", None, True, -1.0, math.nan, math.inf, 1j])
def test_bad_noise_multiplier_is_refused_when_built_and_when_loaded(value):
    with pytest.raises(InvalidValueError, match="noise_multiplier"):
        Gaussian(value)
    with pytest.raises(InvalidValueError, match="noise_multiplier"):
        mechanism_from_dict({"kind": "gaussian", "noise_multiplier": value})


@pytest.mark.parametrize("value", ["0.1", None, False, 0.0, -0.1, 1.0001, math.nan, math.inf])
def test_bad_sampling_rate_is_refused(value):
    with pytest.raises(InvalidValueError, match="sampling_rate"):
        PoissonSampled(Gaussian(1.0), value)


@pytest.mark.parametrize("mechanism", [1.0, "gaussian", 2 * STEP, Composition()])
def test_only_one_release_can_be_sampled(mechanism):
    with pytest.raises(InvalidValueError, match="must be one release"):
        PoissonSampled(mechanism, 0.1)


def test_rates_of_samples_of_samples_must_not_vanish():
    with pytest.raises(InvalidValueError, match="sampling_rate"):
        PoissonSampled(PoissonSampled(Gaussian(1.0), 1e-200), 1e-200)


@pytest.mark.parametrize("count", ["3", 2.5, None, True, -1, 2**54])
def test_bad_count_is_refused(count):
    with pytest.raises(InvalidValueError, match="count"):
        count * STEP


def test_composition_of_something_else_is_refused():
    with pytest.raises(InvalidValueError, match="parts"):
        Composition(((1.0, 2),))
    with pytest.raises(TypeError):
        STEP + 1


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2.0, "1e-5", math.nan, None])
def test_bad_delta_is_refused(delta):
    with pytest.raises(InvalidValueError, match="delta"):
        STEP.epsilon(delta)


@pytest.mark.parametrize("epsilon", [-1e-9, math.inf, math.nan, "3", None])
def test_bad_epsilon_is_refused(epsilon):
    with pytest.raises(InvalidValueError, match="epsilon"):
        STEP.delta(epsilon)
