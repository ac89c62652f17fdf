import dataclasses
import json
import math
import time
from pathlib import Path

import mpmath as mp
import pytest
from accounting_oracles import (
    brute_force_delta,
    direct_log_delta,
    exact_gaussian_delta,
    exact_log_delta,
    pld_accountant,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_dp.accounting.mechanisms import Composition, Gaussian, PoissonSampled
from lightning_dp.accounting.profile.closed_form import step_delta
from lightning_dp.accounting.profile.losses import SampledGaussianLoss

REFERENCE = json.loads((Path(__file__).parent / "reference_epsilon.json").read_text())["cases"]
TABLE = [
    (((0.01, 1.0, 1000),), 1e-5, 1.8282366667),
    (((0.01, 1.0, 1000),), 1e-6, 2.1245151711),
    (((0.01, 1.0, 1000),), 1e-8, 2.6978679345),
    (((0.01, 1.0, 1000),), 1e-10, 3.2904437509),
    (((0.01, 1.0, 1000),), 1e-12, 3.9142981560),
    (((0.01, 1.0, 1000),), 1e-15, 4.8545377506),
    (((0.004, 0.8, 15_000),), 1e-5, 4.3794743601),
    (((256 / 60_000, 1.1, 14_062),), 1e-5, 2.3815969214),
    (((256 / 60_000, 1.1, 14_062),), 1e-6, 2.6966594024),
    (((256 / 60_000, 1.1, 14_062),), 1e-8, 3.2505540906),
    (((256 / 60_000, 1.1, 14_062),), 1e-10, 3.7358386025),
    (((256 / 60_000, 1.1, 14_062),), 1e-12, 4.1744687005),
    (((256 / 60_000, 1.1, 14_062),), 1e-15, 4.7716741332),
    (((0.001, 0.5, 100_000),), 1e-6, 14.7331884490),
    (((1.0, 20.0, 100),), 1e-5, 1.9930914044),
    (((0.5, 5.0, 200),), 1e-6, 7.4407974263),
    (((1e-5, 1.0, 1_000_000),), 1e-6, 0.0452440420),
    (((0.1, 0.6, 500),), 1e-5, 50.0731953678),
    (((0.9, 3.0, 100),), 1e-5, 16.8214213740),
    (((0.01, 1.5, 500), (0.01, 1.0, 1000), (0.02, 0.8, 300)), 1e-5, 4.2266653117),
    (tuple((0.01, 2 * 0.4 ** (k / 99), 20) for k in range(100)), 1e-5, 2.2776945631),
    (((0.01, 0.3, 1000),), 1e-5, 69.8157107130),
    (((0.5, 50.0, 1000),), 1e-5, 1.2001620313),
    (((0.01, 1.0, 1),), 1e-5, 0.1994504478),
    (((0.001, 2.0, 10_000_000),), 1e-6, 8.9607374357),
    (((0.001, 0.1, 100),), 1e-5, 156.857),
]

rates = st.floats(-7, 0).map(lambda power: 10.0**power) | st.floats(0.5, 1.0) | st.just(1.0)
sigmas = st.floats(math.log(0.05), math.log(1000)).map(math.exp) | st.floats(0.3, 5)
counts = st.integers(1, 3) | st.floats(0, 7).map(lambda power: int(10**power))
deltas = st.floats(-15, -0.31).map(lambda power: 10.0**power)
phase_lists = st.lists(st.tuples(rates, sigmas, counts), min_size=1, max_size=3, unique_by=lambda phase: phase[:2])


def mechanism(phases):
    return Composition(tuple((PoissonSampled(Gaussian(sigma), q), count) for q, sigma, count in phases))


def one_direction(run, index):
    """The profile of removing (0) or of adding (1) a record alone."""
    both = run.profile()
    return dataclasses.replace(both, directions=both.directions[index : index + 1])


def id_of(value):
    return f"{len(value)}phases-{value[0]}" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(("phases", "delta", "epsilon"), TABLE, ids=id_of)
def test_epsilon_matches_the_table(phases, delta, epsilon):
    tolerance = 1e-4 if epsilon == 156.857 else 1e-6
    assert mechanism(phases).epsilon(delta) == pytest.approx(epsilon, rel=tolerance)


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: f"{case['phases'][0]}-{case['delta']}")
def test_epsilon_matches_the_reference_file(case):
    assert mechanism(case["phases"]).epsilon(case["delta"]) == pytest.approx(case["epsilon"], rel=1e-6)


@pytest.mark.parametrize("case", [case for case in REFERENCE if case["epsilon_add"]], ids=lambda c: str(c["phases"][0]))
def test_adding_a_record_matches_the_reference_file(case):
    adding = one_direction(mechanism(case["phases"]), 1).epsilon(case["delta"])
    assert adding == pytest.approx(case["epsilon_add"], rel=1e-6)


@pytest.mark.parametrize(("phases", "delta", "epsilon"), [row for row in TABLE if len(row[0]) < 9], ids=id_of)
def test_delta_inverts_epsilon(phases, delta, epsilon):
    run = mechanism(phases)
    assert run.delta(run.epsilon(delta)) == pytest.approx(delta, rel=1e-5)


# Lines and node counts that resolve the integrals below to more digits than are compared.
EXACT = [
    ((0.01, 1.0, 1000), 1e-5, True, 5, 0.3, 300),
    ((0.01, 1.0, 1000), 1e-5, False, 9, 1.2, 60),
    ((256 / 60_000, 1.1, 14_062), 1e-10, True, 8, 0.6, 60),
    ((0.5, 5.0, 200), 1e-15, True, 5, 0.3, 60),
    ((0.9, 3.0, 100), 1e-5, False, 1.0, 0.15, 80),
]


@pytest.mark.parametrize(("phase", "delta", "removing", "c", "spacing", "nodes"), EXACT, ids=str)
def test_epsilon_is_above_the_50_digit_truth_by_less_than_1e_9(phase, delta, removing, c, spacing, nodes):
    value = one_direction(mechanism((phase,)), 0 if removing else 1).epsilon(delta)
    log_truth = exact_log_delta(*phase, value, removing, c, spacing, nodes)
    assert log_truth <= math.log(delta)
    assert exact_log_delta(*phase, value * (1 - 1e-9), removing, c, spacing, nodes) > math.log(delta)


@pytest.mark.slow
def test_tiny_rates_are_above_the_50_digit_truth_by_less_than_1e_6():
    phase, line = (1e-5, 1.0, 10**6), (12, 0.7, 900)
    value = mechanism((phase,)).epsilon(1e-6)
    assert exact_log_delta(*phase, value, True, *line) <= math.log(1e-6)
    assert exact_log_delta(*phase, value * (1 - 1e-6), True, *line) > math.log(1e-6)


def test_rare_hits_are_above_a_direct_sum_by_less_than_1e_9():
    phase, line = (0.02, 1.0, 20), (4, 0.3, 2500)
    value = mechanism((phase,)).epsilon(1e-5)
    assert direct_log_delta(*phase, value, *line) <= math.log(1e-5)
    assert direct_log_delta(*phase, value * (1 - 1e-9), *line) > math.log(1e-5)


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("delta", [0.4, 1e-2, 1e-5, 1e-12])
def test_unsampled_composition_is_the_analytic_gaussian(mu, delta):
    def excess(epsilon):
        return norm.sf(epsilon / mu - mu / 2) - math.exp(epsilon + norm.logsf(epsilon / mu + mu / 2)) - delta

    expected = brentq(excess, 0, mu**2 + 20 * mu, xtol=1e-14) if excess(0) > 0 else 0.0
    value = (4 * Gaussian(2 / mu)).epsilon(delta)
    assert value == pytest.approx(expected, rel=1e-7)


@settings(deadline=None, max_examples=300)
@given(st.floats(-4, 5), st.floats(-300, -0.5), st.floats(0, 3))
@example(math.log10(5434.9786924964665), -15.0, 14807664.739995265 / 5434.9786924964665 / (5434.9786924964665 / 2 + 5))
def test_plain_gaussians_contain_the_50_digit_truth(log_mu, log_delta, place):
    profile = Gaussian(10**-log_mu).profile()
    mu = 1 / 10**-log_mu  # as the mechanism divides
    epsilon = place * mu * (mu / 2 + 5)
    lower, upper = profile.delta_interval(epsilon)
    assert lower <= exact_gaussian_delta(mu, epsilon) <= upper
    lower, upper = profile.epsilon_interval(10**log_delta)
    assert exact_gaussian_delta(mu, upper) <= 10**log_delta
    assert lower == 0 or exact_gaussian_delta(mu, lower) >= 10**log_delta


@settings(deadline=None, max_examples=300)
@given(st.floats(-9, -1e-6), st.floats(-2, 4), st.floats(0, 1))
@example(-0.5, -1.0, 1.0)
@example(-3.0, 0.0, 1 - 1e-15)
def test_one_step_contains_the_50_digit_truth(log_q, log_sigma, place):
    q, sigma = 10**log_q, 10**log_sigma
    with mp.workdps(50):
        rate, mu = mp.mpf(q), 1 / mp.mpf(sigma)
        for direction, largest in (("remove", min(600, float(mu) ** 2 + 9 * float(mu))), ("add", -math.log1p(-q))):
            epsilon = mp.mpf(place * largest)
            if direction == "remove":
                exact = rate * exact_gaussian_delta(mu, mp.log1p(mp.expm1(epsilon) / rate))
            else:
                ratio = 1 + mp.expm1(-epsilon) / rate
                left = 1 - (1 - rate) * mp.exp(epsilon)
                exact = left * exact_gaussian_delta(mu, -mp.log(ratio)) if ratio > 0 and left > 0 else 0
            loss = SampledGaussianLoss(q, sigma, direction)
            lower, upper = (step_delta(loss, float(epsilon), sign) for sign in (-1, 1))
            assert lower <= exact <= upper


def test_sampling_everything_is_the_plain_mechanism():
    assert (7 * PoissonSampled(Gaussian(3.0), 1.0)).epsilon(1e-5) == (7 * Gaussian(3.0)).epsilon(1e-5)


@pytest.mark.parametrize("q", [1e-4, 0.03, 0.7])
@pytest.mark.parametrize("sigma", [0.4, 1.0, 6.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.1, 1.0])
def test_one_step_matches_direct_summation(q, sigma, epsilon):
    expected = brute_force_delta(q, sigma, 1, epsilon, points=400_001)
    assert PoissonSampled(Gaussian(sigma), q).delta(epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize("q", [0.03, 0.7])
@pytest.mark.parametrize("sigma", [0.6, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_two_steps_match_direct_summation(q, sigma, epsilon):
    expected = brute_force_delta(q, sigma, 2, epsilon)
    assert (2 * PoissonSampled(Gaussian(sigma), q)).delta(epsilon) == pytest.approx(expected, rel=1e-5, abs=1e-13)


@pytest.mark.parametrize(
    "phases",
    [
        ((0.01, 1.0, 1000),),
        ((0.002, 0.7, 300), (0.05, 1.5, 20)),
        ((1.0, 4.0, 3), (0.1, 1.0, 10)),
        ((0.001, 0.4, 200),),
        ((0.3, 2.0, 2),),
    ],
    ids=str,
)
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_epsilon_agrees_with_the_pld_accountant(phases, delta):
    pessimistic = pld_accountant(phases).get_epsilon(delta)
    value = mechanism(phases).epsilon(delta)
    # The accountant truncates, so that at small delta it may fall short of the truth by some 1e-6.
    assert value <= pessimistic * (1 + 1e-5)
    assert value == pytest.approx(pessimistic, rel=3e-3)


@settings(max_examples=50, deadline=None)
@given(phase_lists, deltas)
@example([(1e-7, 0.3, 10**7)], 1e-6)
@example([(1e-7, 1000.0, 2)], 1e-15)
@example([(0.999999, 0.05, 10**7)], 1e-15)
@example([(0.3, 0.05, 2), (1.0, 1000.0, 1)], 0.4)
def test_any_setting_gives_a_number(phases, delta):
    value = mechanism(phases).epsilon(delta)
    assert 0 <= value < math.inf
    assert 0 <= mechanism(phases).delta(value) <= 1


@pytest.mark.parametrize(
    "phase",
    [(1e-4, 1.0, 592), (1e-7, 0.7, 8447), (0.0017, 0.54, 25), (0.999999, 0.05, 10**7), (1e-7, 0.3, 10**7)],
    ids=str,
)
def test_hard_settings_take_bounded_time(phase):
    start = time.process_time()
    mechanism((phase,)).epsilon(1e-12)
    assert time.process_time() - start < 15


@pytest.mark.parametrize("sigma", [1e-300, 1e-20, 1e-3, 0.019, 1e5, 1e100, 1e300])
@pytest.mark.parametrize("q", [1e-300, 1e-12, 0.5, 1 - 1e-16])
def test_absurd_values_still_give_a_valid_bound(q, sigma):
    run = 3 * PoissonSampled(Gaussian(sigma), q)
    assert run.epsilon(1e-5) >= 0
    assert 0 <= run.delta(1.0) <= 1


@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 1e-6, 50.0, 1e4, 1e300])
def test_delta_stays_in_range_at_any_epsilon(epsilon):
    for run in (1000 * PoissonSampled(Gaussian(1.0), 0.01), 2 * PoissonSampled(Gaussian(0.1), 0.5), 3 * Gaussian(2.0)):
        assert 0 <= run.delta(epsilon) <= 1


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 0.9), st.floats(0.5, 20), st.integers(1, 5000), st.floats(1e-9, 0.3), st.floats(1.001, 1.5))
def test_epsilon_is_monotone_in_every_argument(q, sigma, count, delta, factor):
    value = mechanism(((q, sigma, count),)).epsilon(delta)
    slack = 1 + 1e-4
    assert mechanism(((min(1.0, q * factor), sigma, count),)).epsilon(delta) * slack >= value
    assert mechanism(((q, sigma * factor, count),)).epsilon(delta) <= value * slack
    assert mechanism(((q, sigma, math.ceil(count * factor)),)).epsilon(delta) * slack >= value
    assert mechanism(((q, sigma, count),)).epsilon(min(0.9, delta * factor)) <= value * slack
    assert mechanism(((q, sigma, count), (0.01, 5.0, 10))).epsilon(delta) * slack >= value


def test_one_query_of_a_typical_run_is_fast():
    times = []
    for k in range(20):
        start = time.perf_counter()
        mechanism(((0.01, 1.0, 1000 + k),)).epsilon(1e-5)
        times.append(time.perf_counter() - start)
    assert sorted(times)[10] < 0.1
