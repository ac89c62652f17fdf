"""Corners where an earlier version, or a plausible shortcut, was wrong: the right value from an independent sum."""

import math

import mpmath as mp
import numpy as np
import pytest

from lightning_dp.accounting.mechanisms import Composition, Gaussian, Laplace, PoissonSampled, SampledGroup
from lightning_dp.accounting.profile.cumulants import Parts
from lightning_dp.accounting.profile.losses import SampledGaussianLoss
from lightning_dp.accounting.profile.sampled_gaussian import Step


def log_moment(q, sigma, c, direction):
    """``log E_P[exp(c L)]`` by a sum in the logarithm over a fine grid."""
    # The mass may lie at any of the moments' modes: around 0, or around (1 + c) / sigma.
    x = np.arange(-14 - c / sigma, 14 + (1 + c) / sigma, min(0.02, sigma / 50))
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + x / sigma - 1 / (2 * sigma**2))
    exponent = (1 + c) * ratio if direction == "remove" else -c * ratio
    terms = exponent - x**2 / 2 + math.log((x[1] - x[0]) / math.sqrt(2 * math.pi))
    return float(np.logaddexp.reduce(terms))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("q", "sigma", "c"),
    [
        (2.6e-4, 2.82, 135.5),
        (1.5e-8, 1.38, 76.6),
        (0.25, 0.02, 0.8),
        (0.01, 0.025, 3.0),
        (0.5, 1.0, 40.0),
        (0.9, 8.0, 300.0),
    ],
)
def test_moments_with_far_modes_match_a_sum_in_the_logarithm(direction, q, sigma, c):
    parts = Parts((Step(SampledGaussianLoss(q, sigma, direction)),), (1,), 0.0)
    value = float(parts.cumulants(np.array([c]))[0][0])
    assert value == pytest.approx(log_moment(q, sigma, c, direction), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("q", "sigma", "count", "epsilon", "truth"),
    [(0.3, 1.0, 1000, 300.0, 9.265e-72), (0.01, 1.0, 10**7, 1450.0, 2.182e-49), (0.01, 1.0, 10**5, 80.0, 1.3766e-61)],
)
def test_delta_far_out_is_that_of_the_contour(q, sigma, count, epsilon, truth):
    lower, upper = (count * PoissonSampled(Gaussian(sigma), q)).profile().delta_interval(epsilon)
    assert lower <= upper
    assert upper == pytest.approx(truth, rel=2e-4)


def test_many_steps_with_hardly_any_noise_in_some():
    run = 10_477 * PoissonSampled(Gaussian(7.865), 0.99958) + 34 * PoissonSampled(Gaussian(0.02425), 0.005464)
    lower, upper = run.profile("replace_one").delta_interval(1676.47)
    assert lower <= upper == pytest.approx(0.014915, rel=1e-4)


def test_a_lower_bound_is_no_guess_where_sums_leave_the_range_of_floats():
    lower, upper = (4615 * PoissonSampled(Gaussian(1.6897), 1.8689e-8)).profile("replace_one").delta_interval(0.01344)
    # Losses above 3.1e-5 have a probability of at most 2.5e-27, and for the others Chernoff's bound, at 50 digits and
    # order 3e4, is exp(-403); one step has 4.3e-118 / 4615.
    assert lower <= 2.5e-27
    assert 4.3e-118 <= upper <= 1e-4


def added_delta(q, sigma, epsilon):
    """Delta of adding a record in one step, at 60 digits: ``Q - e^eps ((1 - q) Q + q P)`` below one output."""
    with mp.workdps(60):
        q, sigma, epsilon = mp.mpf(q), mp.mpf(sigma), mp.mpf(epsilon)
        ratio = 1 + mp.expm1(-epsilon) / q
        if ratio <= 0:
            return 0.0
        x = sigma * mp.log(ratio) + 1 / (2 * sigma)
        return float(mp.ncdf(x) * (1 - (1 - q) * mp.exp(epsilon)) - q * mp.exp(epsilon) * mp.ncdf(x - 1 / sigma))


@pytest.mark.parametrize(
    ("q", "sigma", "share"), [(0.999976, 0.157, 0.999), (1 - 7.6e-7, 1.1, 0.9999), (0.9, 2.0, 0.5), (1e-3, 1.0, 0.9)]
)
def test_adding_a_record_near_the_largest_loss_is_not_below_60_digits(q, sigma, share):
    epsilon = -math.log1p(-q) * share
    both = PoissonSampled(Gaussian(sigma), q).profile()
    adding = type(both)(both.directions[1:], both.adjacency)
    truth = added_delta(q, sigma, epsilon)
    assert truth * (1 - 1e-12) <= adding.delta(epsilon) <= truth * 1.01 + 1e-12


@pytest.mark.parametrize("sigma", [1e100, 1e150])
def test_absurd_noise_still_costs_something(sigma):
    assert Gaussian(sigma).delta(0.0) == pytest.approx(1 / (sigma * math.sqrt(2 * math.pi)), rel=1e-9)


def test_settings_that_are_replaced_by_less_private_ones_have_no_lower_bound():
    assert PoissonSampled(Gaussian(0.1), 1 - 1e-10).profile("replace_one").epsilon_interval(1e-5).lower == 0
    assert PoissonSampled(Gaussian(1e8), 1e-3).profile().epsilon_interval(1e-13).lower == 0


@pytest.mark.parametrize(("sigma", "order"), [(0.1, 2000.0), (0.02, 200.0), (1e-3, 2.0), (1.0, 1e6)])
def test_renyi_divergences_of_any_order_are_finite_and_at_most_those_without_sampling(sigma, order):
    value = PoissonSampled(Gaussian(sigma), 0.01).profile().rdp(order)
    assert 0 < value <= order / (2 * sigma**2) * (1 + 1e-12)


def test_large_groups_have_a_bound():
    for group in (SampledGroup(2.0, 0.9, 400), SampledGroup(2.0, 0.999, 110), SampledGroup(10.0, 0.01, 9999)):
        for adjacency in ("add_remove", "replace_one"):
            assert 0 < group.epsilon(1e-5, adjacency=adjacency) < math.inf


def test_a_group_of_a_run_costs_less_than_groups_in_general():
    run = 1000 * PoissonSampled(Gaussian(1.0), 0.01)
    exact = run.group(3).epsilon(1e-5)
    # Three steps lead to data without the group: 3 eps at delta (e^(3 eps) - 1) / (e^eps - 1).
    general = min(
        3 * epsilon
        for epsilon in np.linspace(2, 6, 81)
        if run.delta(float(epsilon)) * math.expm1(3 * epsilon) / math.expm1(epsilon) <= 1e-5
    )
    assert run.epsilon(1e-5) < exact < general


def test_a_mix_with_rare_laplace_noise_is_read_in_time():
    run = 6_277_206 * PoissonSampled(Laplace(0.0542), 1.24e-8) + Composition(
        ((PoissonSampled(Gaussian(0.5312), 9.5e-4), 2), (PoissonSampled(Gaussian(22_569.0), 0.002835), 2))
    )
    assert 0 < run.epsilon(4.9e-5, adjacency="replace_one") < 10
