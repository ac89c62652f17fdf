"""The composition theorems, against their formulas in high precision, and against mechanisms that attain them."""

from __future__ import annotations

import math

import mpmath as mp
import pytest

from lightning_dp import Gaussian, PoissonSampled, errors
from lightning_dp.accounting.composition_theorems import (
    advanced_composition,
    basic_composition,
    central_limit_epsilon_not_a_bound,
    group_privacy,
)


def test_basic_composition_adds_epsilons_and_deltas() -> None:
    pairs = [(0.1, 1e-6)] * 10 + [(2.0, 0.0)]
    assert basic_composition(pairs) == (pytest.approx(3.0, rel=1e-15), pytest.approx(1e-5, rel=1e-15))
    assert basic_composition([]) == (0.0, 0.0)
    assert basic_composition([(1.0, 0.9), (1.0, 0.9)]) == (2.0, 1.0)


@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 0.01, 1.0, 20.0])
@pytest.mark.parametrize(("count", "delta", "slack"), [(1, 0.0, 0.5), (1000, 1e-9, 1e-5), (10**7, 0.0, 1e-12)])
def test_advanced_composition_is_its_formula(epsilon: float, count: int, delta: float, slack: float) -> None:
    with mp.workdps(40):
        e = mp.mpf(epsilon)
        expected = mp.sqrt(2 * count * mp.log(1 / mp.mpf(slack))) * e + count * e * (mp.exp(e) - 1)
        expected_delta = count * mp.mpf(delta) + mp.mpf(slack)
    found, found_delta = advanced_composition(epsilon=epsilon, delta=delta, count=count, slack=slack)
    assert found >= expected
    assert found == pytest.approx(float(expected), rel=1e-13)
    assert found_delta >= expected_delta
    assert found_delta == pytest.approx(float(expected_delta), rel=1e-13)


def test_advanced_composition_holds_for_randomized_response() -> None:
    # The composition of k answers, each true with probability p = e^eps / (1 + e^eps), exactly.
    epsilon, count, slack = 0.1, 200, 1e-3
    total, delta = advanced_composition(epsilon=epsilon, delta=0.0, count=count, slack=slack)
    p = mp.e**epsilon / (1 + mp.e**epsilon)
    spent = mp.fsum(
        mp.binomial(count, k)
        * max(mp.mpf(0), p**k * (1 - p) ** (count - k) - mp.e**total * p ** (count - k) * (1 - p) ** k)
        for k in range(count + 1)
    )
    assert 0 < spent <= delta


@pytest.mark.parametrize("epsilon", [1e-12, 1e-3, 0.5, 3.0])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_group_privacy_is_its_formula(epsilon: float, size: int) -> None:
    with mp.workdps(60):
        factor = (mp.exp(size * mp.mpf(epsilon)) - 1) / (mp.exp(mp.mpf(epsilon)) - 1)
    found, delta = group_privacy(epsilon=epsilon, delta=1e-12, size=size)
    assert found == size * epsilon
    assert delta == pytest.approx(float(factor * mp.mpf(1e-12)), rel=1e-12)


def test_group_privacy_at_its_ends() -> None:
    assert group_privacy(epsilon=0.0, delta=1e-6, size=5) == (0.0, pytest.approx(5e-6))
    assert group_privacy(epsilon=2.0, delta=0.0, size=5) == (10.0, 0.0)
    assert group_privacy(epsilon=500.0, delta=1e-6, size=3) == (1500.0, 1.0)
    assert group_privacy(epsilon=400.0, delta=1e-300, size=2)[1] < 1e-120


def test_group_privacy_is_above_what_a_mechanism_costs_a_group() -> None:
    step = Gaussian(3.0)
    epsilon, delta = group_privacy(epsilon=step.epsilon(1e-9), delta=1e-9, size=3)
    assert step.group(3).epsilon(delta) < epsilon


def gaussian_delta(mu: mp.mpf, epsilon: mp.mpf) -> mp.mpf:
    """Profile of the Gaussian mechanism (Balle and Wang, 2018, Theorem 8)."""
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(
    "phases",
    [[(0.01, 1.0, 1)], [(0.01, 1.0, 1000)], [(0.01, 1.5, 500), (0.02, 0.8, 300)], [(1.0, 20.0, 100), (0.1, 2.0, 50)]],
    ids=str,
)
def test_the_central_limit_is_its_formula(phases: list[tuple[float, float, int]]) -> None:
    mechanism = sum((n * PoissonSampled(Gaussian(s), q) for q, s, n in phases), 0 * Gaussian(1.0))
    found = central_limit_epsilon_not_a_bound(mechanism, 1e-5)
    with mp.workdps(40):
        terms = [
            n * (mp.mpf(s) ** -2 if q == 1 else mp.mpf(q) ** 2 * (mp.exp(mp.mpf(s) ** -2) - 1)) for q, s, n in phases
        ]
        mu = mp.sqrt(mp.fsum(terms))
        assert gaussian_delta(mu, found * (1 + mp.mpf(1e-9))) < 1e-5 < gaussian_delta(mu, found * (1 - mp.mpf(1e-9)))


def test_the_central_limit_is_exact_without_sampling_and_no_bound_with_it() -> None:
    plain, sampled = 30 * Gaussian(9.0), PoissonSampled(Gaussian(1.0), 0.01)
    assert central_limit_epsilon_not_a_bound(plain, 1e-5) == pytest.approx(plain.epsilon(1e-5), rel=1e-9)
    assert central_limit_epsilon_not_a_bound(sampled, 1e-5) == pytest.approx(0.037, abs=5e-4)
    assert sampled.epsilon(1e-5) == pytest.approx(0.199, abs=5e-4)


def test_the_central_limit_at_its_ends() -> None:
    assert central_limit_epsilon_not_a_bound(0 * Gaussian(1.0), 1e-5) == 0
    assert math.isinf(central_limit_epsilon_not_a_bound(PoissonSampled(Gaussian(0.01), 0.1), 1e-5))
    assert math.isinf(central_limit_epsilon_not_a_bound(Gaussian(0.0), 1e-5))


@pytest.mark.parametrize(
    "call",
    [
        lambda: basic_composition([(-1.0, 0.0)]),
        lambda: basic_composition([(1.0, 1.0)]),
        lambda: basic_composition([(math.inf, 0.0)]),
        lambda: advanced_composition(epsilon=1.0, delta=0.0, count=0, slack=0.1),
        lambda: advanced_composition(epsilon=1.0, delta=0.0, count=1, slack=0.0),
        lambda: advanced_composition(epsilon=1.0, delta=-0.1, count=1, slack=0.1),
        lambda: group_privacy(epsilon=1.0, delta=0.0, size=0),
        lambda: group_privacy(epsilon=math.nan, delta=0.0, size=1),
        lambda: central_limit_epsilon_not_a_bound(Gaussian(1.0), 0.0),
        lambda: central_limit_epsilon_not_a_bound(0 * Gaussian(1.0), 2.0),
    ],
)
def test_numbers_out_of_range_are_refused(call) -> None:
    with pytest.raises(errors.InvalidValueError):
        call()
