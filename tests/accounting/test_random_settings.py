"""Random settings: no exception, no NaN, no hanging call, monotone, and true beside high precision and other code."""

import math
import time

import numpy as np
import pytest
from accounting_oracles import exact_log_delta, pld_accountant
from scipy.special import log_ndtr
from scipy.stats import norm

from lightning_dp.accounting.mechanisms import Composition, Gaussian, PoissonSampled

FEW, MANY = 60, 2000
SLACK = 1e-5  # relative; an accurate reading is far closer


def mechanism(phases):
    return Composition(tuple((PoissonSampled(Gaussian(sigma), q), count) for q, sigma, count in phases))


def random_setting(random):
    phases = [
        (10 ** random.uniform(-7, 0), 10 ** random.uniform(-1, math.log10(200)), int(10 ** random.uniform(0, 7)))
        for _ in range(random.choice([1, 1, 1, 2, 3, 5, 10, 50]))
    ]
    return phases, 10 ** random.uniform(-15, -2)


def worse(random, phases, delta):
    """The same with one argument changed for the worse."""
    k, factor = int(random.integers(len(phases))), 1 + 10 ** random.uniform(-2, 0)
    q, sigma, count = phases[k]
    changed = [(min(1.0, q * factor), sigma, count), (q, sigma / factor, count), (q, sigma, math.ceil(count * factor))]
    choice = int(random.integers(4))
    if choice == 3:
        return phases, delta / factor
    return [*phases[:k], changed[choice], *phases[k + 1 :]], delta


def check(seed, number):
    random, times, loose = np.random.default_rng(seed), [], 0
    for _ in range(number):
        phases, delta = random_setting(random)
        readings = []
        for setting in ((phases, delta), worse(random, phases, delta)):
            start = time.thread_time()
            readings.append(mechanism(setting[0]).profile().epsilon_interval(setting[1]))
            times.append(time.thread_time() - start)
            assert 0 <= readings[-1].lower <= readings[-1].upper < math.inf
        one, other = readings
        accurate = [reading.upper - reading.lower <= SLACK * reading.upper for reading in readings]
        loose += not all(accurate)
        assert one.lower <= other.upper
        if all(accurate):
            assert one.upper <= other.upper * (1 + SLACK)
    return times, loose


def test_random_settings_give_certified_monotone_numbers():
    times, loose = check(seed=1, number=FEW)
    assert max(times) < 2
    assert loose <= 0.05 * FEW


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_2000_random_settings_give_certified_monotone_numbers_in_time():
    times, loose = check(seed=2, number=MANY)
    assert np.median(times) < 0.1
    assert max(times) < 2
    assert loose <= 0.03 * MANY


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_random_settings_agree_with_the_pld_accountant():
    random, compared = np.random.default_rng(3), 0
    while compared < 40:
        q, sigma, count = (
            10 ** random.uniform(-3, 0),
            10 ** random.uniform(-0.3, 1.3),
            int(10 ** random.uniform(0, 3.5)),
        )
        delta = 10 ** random.uniform(-10, -2)
        value = mechanism([(q, sigma, count)]).epsilon(delta)
        if not 0.05 < value < 60:
            continue
        spacing = min(1e-3, value / 3e3)
        pessimistic = pld_accountant([(q, sigma, count)], spacing).get_epsilon(delta)
        # Its discretisation over-states; its truncation may under-state by some 1e-6.
        assert value <= pessimistic * (1 + 1e-5)
        assert value >= pessimistic * (1 - 2e-3) - spacing
        compared += 1


# Settings drawn once at random (q 1e-3..1, sigma 0.6..8, T 20..20,000, delta 1e-15..1e-4), each with a line, a spacing
# and a number of nodes that resolve the integral to far more digits than are compared.
HIGH_PRECISION_SEED, HIGH_PRECISION = 4, 10


def high_precision_settings():
    random, settings = np.random.default_rng(HIGH_PRECISION_SEED), []
    while len(settings) < HIGH_PRECISION:
        q, sigma = float(10 ** random.uniform(-3, 0)), float(10 ** random.uniform(-0.2, 0.9))
        count, delta = int(10 ** random.uniform(1.3, 4.3)), float(10 ** random.uniform(-15, -4))
        mu = q * math.sqrt(count * math.expm1(min(sigma**-2, 5.0)))
        if 0.3 < mu < 3 and q * count > 5:
            settings.append((q, sigma, count, delta, bool(len(settings) % 2 == 0), mu))
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("setting", high_precision_settings(), ids=str)
def test_epsilon_is_never_below_50_digit_arithmetic(setting):
    q, sigma, count, delta, removing, mu = setting
    both = mechanism([(q, sigma, count)]).profile()
    one = type(both)(both.directions[:1] if removing else both.directions[1:], both.adjacency)
    lower, upper = one.epsilon_interval(delta)
    line = (0.5 + 2 / mu, 0.12 / mu, 180)
    assert exact_log_delta(q, sigma, count, upper, removing, *line) <= math.log(delta)
    assert exact_log_delta(q, sigma, count, lower, removing, *line) >= math.log(delta)
    assert upper - lower <= 1e-8 * upper


@pytest.mark.parametrize("sigma", [0.015, 0.0199, 0.02, 0.0205, 0.025, 0.03, 0.05, 0.1, 0.3])
@pytest.mark.parametrize(("q", "count", "delta"), [(0.25, 8, 1e-5), (0.5, 20, 1e-8), (0.01, 2, 1e-5), (0.1, 3, 1e-5)])
def test_little_noise_costs_at_least_what_the_first_outputs_give_away(sigma, q, count, delta):
    # The event that the first m outputs all exceed 1 - k sigma.
    least = 0.0
    for m in range(1, count + 1):
        for k in (0, 1, 2, 3):
            present = (q * norm.cdf(k)) ** m
            if present > delta:
                least = max(least, math.log(present - delta) - m * float(log_ndtr(k - 1 / sigma)))
    assert mechanism([(q, sigma, count)]).epsilon(delta) >= least
