import math

import numpy as np
import pytest
from scipy.stats import norm

from lightning_dp.accounting.mechanisms import Composition, Gaussian, PoissonSampled
from lightning_dp.errors import InvalidValueError

SAMPLED = 500 * PoissonSampled(Gaussian(1.0), 0.01)
MIXED = SAMPLED + 3 * Gaussian(8.0)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_the_trade_off_of_a_gaussian_is_the_closed_form(mu):
    rates = np.array([1e-6, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0])
    value = Gaussian(1 / mu).profile().false_negative(rates)
    exact = norm.cdf(norm.isf(rates) - mu)
    assert (value <= exact + 1e-12).all()
    np.testing.assert_allclose(value, exact, rtol=2e-4, atol=1e-6)


def test_the_trade_off_of_a_sampled_step_is_below_every_threshold_test():
    q, sigma = 0.2, 0.8
    profile = PoissonSampled(Gaussian(sigma), q).profile()
    for threshold in (-1.0, 0.0, 1.0, 2.0, 3.0):
        false_positive = norm.sf(threshold / sigma)
        missed = 1 - ((1 - q) * false_positive + q * norm.sf((threshold - 1) / sigma))
        assert profile.false_negative(float(false_positive)) <= missed + 1e-12


def test_the_trade_off_is_decreasing_convex_and_below_a_blind_guess():
    rates = np.linspace(0, 1, 21)
    missed = MIXED.profile().false_negative(rates)
    assert (np.diff(missed) <= 1e-12).all()
    assert (np.diff(missed, 2) >= -1e-5).all()
    assert (missed <= 1 - rates + 1e-12).all()
    assert missed[-1] == 0


def test_true_positives_at_a_rate_respect_epsilon_and_delta():
    profile = SAMPLED.profile()
    rates = np.array([1e-4, 1e-2, 0.1])
    found = profile.true_positive_at(rates)
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        assert (found <= math.exp(epsilon) * rates + profile.delta(epsilon) + 1e-9).all()
    assert (found >= rates).all()


def test_the_advantage_is_the_total_variation_distance():
    assert Gaussian(2.0).profile().advantage() == pytest.approx(2 * norm.cdf(0.25) - 1, rel=1e-9)
    assert SAMPLED.profile().advantage() == SAMPLED.delta(0.0)


@pytest.mark.parametrize(
    "run", [SAMPLED, MIXED, 40 * PoissonSampled(Gaussian(2.0), 0.5)], ids=["rare", "mixed", "often"]
)
def test_a_gaussian_of_the_given_mu_is_at_least_as_bad(run):
    profile = run.profile()
    mu = profile.gaussian_mu(smallest_delta=1e-8)
    for epsilon in np.linspace(0, profile.epsilon(1e-8), 40):
        assert Gaussian(1 / mu).delta(float(epsilon)) >= profile.delta(float(epsilon)) * (1 - 1e-6)


def test_the_mu_of_a_gaussian_is_its_own():
    assert (4 * Gaussian(5.0)).profile().gaussian_mu() == pytest.approx(0.4, rel=1e-5)


def mironov_talwar_zhang(q, sigma, order):
    """Renyi divergence of one sampled step at an integer order (Mironov, Talwar and Zhang, 2019, Section 3.3)."""
    terms = [
        math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        + k * math.log(q) + (order - k) * math.log1p(-q) + (k * k - k) / (2 * sigma**2)
        for k in range(order + 1)
    ]  # fmt: skip
    return np.logaddexp.reduce(terms) / (order - 1)


@pytest.mark.parametrize(("q", "sigma"), [(1e-4, 0.7), (0.01, 1.0), (0.3, 2.0), (0.9, 5.0)])
@pytest.mark.parametrize("order", [2, 3, 8, 32])
def test_renyi_divergence_of_a_sampled_step_is_the_published_sum(q, sigma, order):
    value = PoissonSampled(Gaussian(sigma), q).profile().rdp(float(order))
    assert value == pytest.approx(mironov_talwar_zhang(q, sigma, order), rel=1e-9)


def test_renyi_divergences_add_up():
    orders = np.array([1.5, 2.0, 7.3, 50.0])
    one, other = PoissonSampled(Gaussian(1.1), 0.02), Gaussian(6.0)
    total = (10 * one + 2 * other).profile().rdp(orders)
    np.testing.assert_allclose(total, 10 * one.profile().rdp(orders) + 2 * orders / (2 * 36.0), rtol=1e-12)
    assert total.shape == orders.shape


def test_the_renyi_bound_is_above_the_exact_epsilon():
    orders = np.linspace(1.1, 60, 200)
    for delta in (1e-5, 1e-10):
        divergences = SAMPLED.profile().rdp(orders)
        # Canonne, Kamath and Steinke, 2020, Proposition 12.
        converted = divergences + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        assert SAMPLED.epsilon(delta) < converted.min() < 1.3 * SAMPLED.epsilon(delta)


def test_arrays_give_arrays_of_the_same_shape():
    deltas = np.array([[1e-3, 1e-5], [1e-7, 1e-9]])
    epsilons = MIXED.epsilon(deltas)
    assert epsilons.shape == deltas.shape
    assert epsilons[1, 0] == MIXED.epsilon(1e-7)
    np.testing.assert_allclose(MIXED.delta(epsilons), deltas, rtol=1e-6)
    assert MIXED.profile().false_negative(deltas).shape == deltas.shape


@pytest.mark.parametrize(
    ("run", "width"),
    [
        (SAMPLED, 1e-9),
        (MIXED, 1e-9),
        (7 * Gaussian(2.0), 1e-8),
        (PoissonSampled(Gaussian(0.5), 0.01), 1e-8),
        (3 * PoissonSampled(Gaussian(1.0), 1e-3), 1e-3),
    ],
    ids=["sampled", "mixed", "plain", "one step", "three steps"],
)
def test_intervals_contain_the_reading_and_are_narrow(run, width):
    lower, upper = run.profile().epsilon_interval(1e-5)
    assert upper == run.epsilon(1e-5)
    assert upper * (1 - width) <= lower <= upper
    lower, upper = run.profile().delta_interval(0.4)
    assert upper == run.delta(0.4)
    assert upper * (1 - width) <= lower <= upper


def test_a_release_without_noise_is_infinitely_bad():
    profile = (2 * Gaussian(0.0)).profile()
    assert profile.epsilon(1e-5) == math.inf
    assert profile.advantage() == 1
    assert profile.false_negative(0.0) == 0
    assert profile.gaussian_mu() == math.inf
    assert profile.rdp(2.0) == math.inf


def test_nothing_released_costs_nothing():
    profile = Composition().profile()
    assert (profile.epsilon(1e-5), profile.delta(0.0), profile.rdp(2.0), profile.gaussian_mu()) == (0, 0, 0, 0)
    assert profile.false_negative(0.1) == pytest.approx(0.9)


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan, "0.1"])
def test_a_rate_outside_the_unit_interval_is_refused(rate):
    with pytest.raises(InvalidValueError, match="`false_positive`"):
        SAMPLED.profile().false_negative(rate)


@pytest.mark.parametrize("order", [1.0, 0.5, math.inf, math.nan])
def test_a_renyi_order_of_one_or_less_is_refused(order):
    with pytest.raises(InvalidValueError, match="`orders`"):
        SAMPLED.profile().rdp(order)
