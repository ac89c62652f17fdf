"""Integers from secret bits against their exact law. False alarms: 1e-6 for each test, with fixed keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lightning_dp.releases.secret_integers import SecretIntegers
from lightning_dp.sampling import KeyStream, insecure_key

COUNT = 200_000


@pytest.fixture
def source() -> SecretIntegers:
    return SecretIntegers(insecure_key(7))


@pytest.mark.parametrize("bound", [2, 3, 10, 255])
def test_every_integer_below_the_bound_is_equally_likely(source: SecretIntegers, bound: int) -> None:
    counts = np.bincount(source.below(bound, COUNT).astype(np.int64), minlength=bound)
    assert len(counts) == bound
    assert stats.chisquare(counts).pvalue > 1e-6


def test_a_bound_that_does_not_divide_the_words_favours_nothing(source: SecretIntegers) -> None:
    """With the remainder alone, the lower two thirds of this range would come three times out of four."""
    bound = 3 * 2**61
    lower = int((source.below(bound, COUNT) < 2**62).sum())
    assert stats.binomtest(lower, COUNT, 2 / 3).pvalue > 1e-6


def test_one_possible_integer_needs_no_bits(source: SecretIntegers) -> None:
    assert not source.below(1, 5).any()
    assert (source.words(3) == KeyStream(insecure_key(7), "release").words(0, 3)).all()


def test_no_word_is_handed_out_twice(source: SecretIntegers) -> None:
    words = np.concatenate([source.words(count) for count in (1, 511, 3, 2000, 7, 600)])
    assert len(np.unique(words)) == len(words)


@pytest.mark.parametrize("numerator", [0, 1, 30, 99, 100])
def test_exp_of_a_ratio_is_hit_exactly(source: SecretIntegers, numerator: int) -> None:
    flags = source.bernoulli_exp_ratio(np.full(COUNT, numerator, dtype=np.uint64), 100)
    assert stats.binomtest(int(flags.sum()), COUNT, math.exp(-numerator / 100)).pvalue > 1e-6


@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_powers_of_exp_are_hit_exactly(source: SecretIntegers, times: int) -> None:
    many = np.full(COUNT, times, dtype=np.uint64)
    whole = int(source.bernoulli_exp_times(many).sum())
    thirds = int(source.bernoulli_exp_times(many, (np.ones(COUNT, dtype=np.uint64), 3)).sum())
    assert stats.binomtest(whole, COUNT, math.exp(-times)).pvalue > 1e-6
    assert stats.binomtest(thirds, COUNT, math.exp(-times / 3)).pvalue > 1e-6


def test_each_flag_has_its_own_probability(source: SecretIntegers) -> None:
    numerators = np.tile(np.array([0, 5, 10], dtype=np.uint64), COUNT)
    flags = source.bernoulli_exp_ratio(numerators, 10).reshape(COUNT, 3)
    assert flags[:, 0].all()
    for column, probability in ((1, math.exp(-0.5)), (2, math.exp(-1.0))):
        assert stats.binomtest(int(flags[:, column].sum()), COUNT, probability).pvalue > 1e-6
