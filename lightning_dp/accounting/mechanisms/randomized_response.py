"""Randomized response."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.mechanisms.atomic import MOST_EPSILON, AtomicMechanism
from lightning_dp.accounting.mechanisms.base import Mechanism
from lightning_dp.accounting.profile.atoms import AtomicPair, randomized


@dataclass(frozen=True)
class RandomizedResponse(AtomicMechanism):
    """Each record answers for itself: with the truth, or with one of the other categories at random.

    The truth has probability ``exp(e) / (exp(e) + categories - 1)`` with ``e = pure_epsilon``; every other answer is
    equally likely (Warner, 1965, for two categories; Kairouz, Bonawitz and Ramage, 2016, for more). Any two true
    answers make a pair, so the guarantee is the same under every adjacency, given that a missing record and a null
    record answer too, as if their truth were one fixed category; the number of answers is public.

    Args:
        pure_epsilon: Epsilon at delta 0, the logarithm of how many times likelier the truth is than another answer;
            greater than 0.
        categories: Number of possible answers, at least 2.
    """

    pure_epsilon: float
    categories: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "pure_epsilon", _validate.positive("pure_epsilon", self.pure_epsilon))
        object.__setattr__(self, "categories", _validate.integer("categories", self.categories, 2))

    def pair(self, adjacency: Adjacency) -> AtomicPair:
        """See :meth:`AtomicMechanism.pair`."""
        return _pair(self.pure_epsilon, self.categories)

    def group(self, size: int) -> Mechanism:
        """The group's records answer one by one, so that all their answers are composed.

        This is also an upper bound for a group that gives a single answer together.
        """
        size = _validate.integer("size", size, 1)
        return self if size == 1 else size * self

    def pooled(self, size: int) -> RandomizedResponse:
        """One randomized answer that says at least as much about a group as its ``size`` answers together.

        They are ``size * pure_epsilon``-DP, and no such mechanism is less private than randomized response over two
        categories (Kairouz, Oh and Viswanath, 2015).
        """
        size = _validate.integer("size", size, 1)
        return self if size == 1 else RandomizedResponse(min(size * self.pure_epsilon, sys.float_info.max))

    def to_dict(self) -> dict[str, Any]:
        """See :meth:`Mechanism.to_dict`."""
        return {"kind": "randomized_response", "pure_epsilon": self.pure_epsilon, "categories": self.categories}


@lru_cache(maxsize=256)
def _pair(epsilon: float, categories: int) -> AtomicPair:
    if epsilon > MOST_EPSILON:
        return randomized(0.0, reveals=1.0)
    return randomized(epsilon, others=float(categories - 1))
