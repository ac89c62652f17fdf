"""Choices and answers against the laws they promise. False alarms: 1e-6 for each test, with fixed seeds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from lightning_dp.accounting import Ledger
from lightning_dp.accounting.mechanisms import ExponentialMechanism, RandomizedResponse
from lightning_dp.releases import choices, exponential_mechanism, randomized_response

COUNT = 100_000
DRAWS = 1500


def chosen(utilities: Any, sensitivity: float, epsilon: float) -> np.ndarray:
    """How often each candidate is chosen in 1,500 releases."""
    ledger = Ledger()
    draws = [
        exponential_mechanism(utilities, sensitivity=sensitivity, epsilon=epsilon, ledger=ledger, insecure_seed=seed)
        for seed in range(DRAWS)
    ]
    return np.bincount(draws, minlength=len(utilities))


def answers(truth: int, categories: int, epsilon: float) -> np.ndarray:
    """How often each category is the answer in 100,000 answers of one call."""
    released = randomized_response(
        np.full(COUNT, truth), categories=categories, epsilon=epsilon, ledger=Ledger(), insecure_seed=truth
    )
    return np.bincount(released, minlength=categories)


@pytest.mark.parametrize(
    ("utilities", "sensitivity", "epsilon"),
    [
        ([0.0, 1.0, 2.0, 3.0], 1.0, 1.0),
        ([5, 5, 5], 1.0, 3.0),
        ([0.1, 0.2, -0.7], 0.25, 2.0),
        ([1e6, 1e6 + 1, 1e6 + 2], 0.5, 0.5),
        ([1e-200, 0.0, 2e-200], 1e-200, 1.0),
    ],
)
def test_candidates_are_chosen_by_the_law_of_the_mechanism(
    utilities: list[float], sensitivity: float, epsilon: float
) -> None:
    weights = special.softmax(epsilon / 2 * (np.array(utilities) / sensitivity))
    assert stats.chisquare(chosen(utilities, sensitivity, epsilon), DRAWS * weights).pvalue > 1e-6


def test_no_choice_tells_neighbours_apart_by_more_than_epsilon() -> None:
    """The worst case: one utility goes up and all others down. Conditional binomial tests, false alarm 1e-6 each."""
    first, second = chosen([0, 0, 0], 1.0, 1.0), chosen([1, -1, -1], 1.0, 1.0)
    largest_share = math.e / (1 + math.e)
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        for more in (one, other):
            assert stats.binomtest(more, one + other, largest_share, alternative="greater").pvalue > 1e-6


def test_weights_that_no_float_can_hold_are_no_trouble() -> None:
    options: dict[str, Any] = {"sensitivity": 1e-5, "epsilon": 1.0, "ledger": Ledger()}
    assert exponential_mechanism([1e300, -1e300, 0], **options) == 0
    assert exponential_mechanism([-1e300, -1e300 + 1e290], **options) == 1
    assert exponential_mechanism(np.array([2**62, 2**62 + 1]), **options) == 1
    assert exponential_mechanism([7.0], **options) == 0


def test_one_good_candidate_among_many_is_found() -> None:
    utilities = np.zeros(100_000)
    utilities[777] = 100.0
    assert exponential_mechanism(utilities, sensitivity=1.0, epsilon=1.0, ledger=Ledger()) == 777


def test_the_exponential_mechanism_is_recorded_as_what_it_was() -> None:
    ledger = Ledger()
    exponential_mechanism([1, 2], sensitivity=3.0, epsilon=0.3, ledger=ledger, purpose="tuning")
    (entry,) = ledger.entries
    assert (entry.mechanism, entry.count, entry.purpose) == (ExponentialMechanism(0.3), 1, "tuning")
    assert ledger.epsilon(1e-12) <= 0.3 * (1 + 1e-9)


@pytest.mark.parametrize(("categories", "epsilon"), [(2, 0.1), (2, 1.0), (5, 2.0), (100, 0.5)])
def test_answers_have_the_law_of_randomized_response(categories: int, epsilon: float) -> None:
    truth = categories - 1
    expected = np.full(categories, 1 / (math.exp(epsilon) + categories - 1))
    expected[truth] *= math.exp(epsilon)
    assert stats.chisquare(answers(truth, categories, epsilon), COUNT * expected).pvalue > 1e-6


def test_no_answer_tells_records_apart_by_more_than_epsilon() -> None:
    """Conditional binomial tests, false alarm 1e-6 each; with epsilon taken 5 % too small they notice."""
    first, second = answers(0, 3, 1.0), answers(1, 3, 1.0)
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        share = stats.binomtest(max(one, other), one + other, math.e / (1 + math.e), alternative="greater")
        assert share.pvalue > 1e-6
    too_small = stats.binomtest(int(first[0]), int(first[0] + second[0]), special.expit(0.95), alternative="greater")
    assert too_small.pvalue < 1e-6


@pytest.mark.parametrize("categories", [2, 3, 1000, 10**9])
@pytest.mark.parametrize("epsilon", [5e-324, 1e-30, 1e-3, 1.0, 30.0, 100.0, 1e300])
def test_the_share_of_kept_answers_is_never_above_the_true_one(categories: int, epsilon: float) -> None:
    """Against 400 digits. From the share the ratio of two answers follows, and must not exceed e**epsilon."""
    share = Fraction(choices._share_kept(epsilon, categories), 2**128)
    with mpmath.workdps(400):
        decay = mpmath.exp(-mpmath.mpf(epsilon))
        true_share = (1 - decay) / (1 + (categories - 1) * decay)
        kept = mpmath.mpf(share.numerator) / share.denominator
        ratio = 1 + kept * categories / (1 - kept)
        assert 0 <= kept < 1
        assert true_share - mpmath.mpf(2) ** -126 <= kept <= true_share
        assert mpmath.log(ratio) <= mpmath.mpf(epsilon) * (1 + mpmath.mpf(10) ** -60)


def test_many_answers_are_one_release() -> None:
    """Each record answers once: the neighbour differs in one answer, and the epsilon of all is that of one."""
    ledger = Ledger()
    randomized_response(np.ones(1000, dtype=np.int64), epsilon=0.7, ledger=ledger)
    randomized_response(4, categories=5, epsilon=0.7, ledger=ledger, purpose="survey")
    assert [(entry.mechanism, entry.count, entry.purpose) for entry in ledger.entries] == [
        (RandomizedResponse(0.7, 2), 1, "release"),
        (RandomizedResponse(0.7, 5), 1, "survey"),
    ]


def test_answers_keep_shape_and_type() -> None:
    options: dict[str, Any] = {"epsilon": 1.0, "ledger": Ledger()}
    flags = randomized_response(np.zeros((3, 4), dtype=np.bool_), **options)
    small = randomized_response(np.zeros(300, dtype=np.uint8), categories=256, **options)
    assert (flags.dtype, flags.shape) == (np.bool_, (3, 4))
    assert small.dtype == np.uint8
    assert type(randomized_response(True, **options)) is bool
    assert type(randomized_response(1, **options)) is int
    assert randomized_response([0, 1, 1], **options).shape == (3,)


def test_a_large_epsilon_keeps_the_answers() -> None:
    truth = np.arange(1000) % 7
    released = randomized_response(truth, categories=7, epsilon=80.0, ledger=Ledger())
    assert (released == truth).all()
