"""Choices released: the best of several by the exponential mechanism, and answers by randomized response."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_dp import _validate
from lightning_dp.accounting import Ledger
from lightning_dp.accounting.mechanisms import ExponentialMechanism, RandomizedResponse
from lightning_dp.errors import InvalidValueError
from lightning_dp.releases.grid import Grid
from lightning_dp.releases.recording import PURPOSE, as_array, checked_ledger, checked_seed, numbers, record
from lightning_dp.releases.secret_integers import Flags, SecretIntegers, Words

_HOPELESS = 2**16  # candidates that are e**-65536 times as likely as the best are not told apart any more
_FIRST_PROPOSALS, _MOST_PROPOSALS = 64, 2**16
_COIN_BITS = 128


def exponential_mechanism(
    utilities: Any,
    *,
    sensitivity: float,
    epsilon: float,
    ledger: Ledger,
    purpose: str = PURPOSE,
    insecure_seed: int | None = None,
) -> int:
    """Chooses a candidate with probability proportional to ``exp(epsilon * utility / (2 * sensitivity))``.

    McSherry and Talwar (2007). Utilities are rounded to a grid that is 2**40 times finer than
    ``2 * sensitivity / epsilon``, and what rounding adds to the sensitivity is paid for. The law on the grid is drawn
    exactly, by rejection: a uniform candidate is kept with probability ``exp`` of minus its distance to the best one,
    so that no weight is ever computed and none can overflow. How long that takes depends on the utilities.

    Args:
        utilities: How good each candidate is, ``(candidates,)``, finite. Which candidates there are is public.
        sensitivity: By how much one record, present or absent, can move any one of the utilities, in their unit.
        epsilon: Of this release under ``add_remove``. Under ``replace_one`` a record moves a utility up to twice as
            far, unless you know better: if replacing a record moves each utility by at most D, pass
            ``sensitivity = D / 2`` there.
        ledger: Where the release is written down, as ``ExponentialMechanism(epsilon)``, before it is made.
        purpose: What the ledger shall say it was for.
        insecure_seed: Make the choice repeatable, for tests. The ledger is stamped, and its guarantee void.

    Returns:
        The index of the chosen candidate.

    Raises:
        InvalidValueError: An argument is out of range; nothing was recorded then.

    Example:
        >>> from lightning_dp import Ledger
        >>> ledger = Ledger()
        >>> exponential_mechanism([10, 900, 20], sensitivity=1, epsilon=1, ledger=ledger)
        1
    """
    values, ledger = _one_axis(numbers("utilities", utilities)), checked_ledger(ledger)
    sensitivity, epsilon = _validate.positive("sensitivity", sensitivity), _validate.positive("epsilon", epsilon)
    grid = Grid.of(sensitivity=sensitivity, noise_multiplier=2 / Fraction(epsilon), rounding=1)
    steps = grid.steps(values)
    # PRIVACY: lifting the worst to a fixed distance below the best leaves the sensitivity as it is.
    behind = np.minimum(steps.max() - steps, _HOPELESS * grid.scale).astype(np.uint64)
    source = record(ExponentialMechanism(epsilon), ledger, purpose, checked_seed(insecure_seed))
    return _first_kept(source, behind, grid.scale)


def randomized_response(
    value: Any,
    *,
    categories: int = 2,
    epsilon: float,
    ledger: Ledger,
    purpose: str = PURPOSE,
    insecure_seed: int | None = None,
) -> Any:
    """Releases answers, each true with probability ``e**epsilon / (e**epsilon + categories - 1)``.

    Otherwise it is one of the other categories, all equally likely (Warner, 1965; for more than two categories Kairouz,
    Bonawitz and Ramage, 2016).

    A call with many answers is *one* release in the ledger. Each answer is the whole of one record's part in it, and
    neighbours differ in one record, hence in one answer: the other answers have the same law under both (parallel
    composition, McSherry, 2009). If one record gives several of the answers, make one call for each round of questions;
    if one person owns several of the records, say so with ``Ledger(rows_per_unit=...)``.

    Args:
        value: The true answer, or an array of any shape with one answer for each record: integers of
            ``0 .. categories - 1``, or booleans. How many answers there are is public.
        categories: Number of possible answers, at least 2.
        epsilon: Of each answer: none is more than ``e**epsilon`` times as likely from one record as from another. The
            same under every adjacency, if a record that is absent answers too, from some fixed category.
        ledger: Where the release is written down, as ``RandomizedResponse(epsilon, categories)``, before it is made.
        purpose: What the ledger shall say it was for.
        insecure_seed: Make the answers repeatable, for tests. The ledger is stamped, and its guarantee void.

    Returns:
        An int or bool for one answer; for an array one of the same shape and type.

    Raises:
        InvalidValueError: An argument is out of range; nothing was recorded then.

    Example:
        >>> from lightning_dp import Ledger
        >>> answer = randomized_response(True, epsilon=1.0, ledger=Ledger())
        >>> answer in (True, False)
        True
    """
    categories = _validate.integer("categories", categories, minimum=2)
    answers, ledger = _answers(value, categories), checked_ledger(ledger)
    epsilon = _validate.positive("epsilon", epsilon)
    mechanism = RandomizedResponse(epsilon, categories)
    source = record(mechanism, ledger, purpose, checked_seed(insecure_seed))
    kept = _coins(source, _share_kept(epsilon, categories), answers.size).reshape(answers.shape)
    uniform = source.below(categories, answers.size).reshape(answers.shape)
    released = np.where(kept, answers, uniform.astype(answers.dtype))
    return released.item() if released.ndim == 0 else released


def _one_axis(utilities: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if utilities.ndim != 1:
        raise InvalidValueError(
            f"`utilities` must have one axis, a number for each candidate; got an array of shape {utilities.shape}."
        )
    return utilities


def _first_kept(source: SecretIntegers, behind: Words, scale: int) -> int:
    """Index ``i`` with probability proportional to ``exp(-behind[i] / scale)``, exactly."""
    proposals = _FIRST_PROPOSALS
    while True:
        indices = source.below(len(behind), proposals)
        wholes, parts = np.divmod(behind[indices], np.uint64(scale))
        kept = source.bernoulli_exp_times(wholes) & source.bernoulli_exp_ratio(parts, scale)
        if kept.any():
            return int(indices[kept.argmax()])
        proposals = min(2 * proposals, _MOST_PROPOSALS)


def _answers(value: Any, categories: int) -> npt.NDArray[Any]:
    array = as_array("value", value)
    if array.dtype.kind not in "biu":
        raise InvalidValueError(
            f"`value` must hold categories as integers of 0 .. {categories - 1}, or booleans; got {array.dtype}."
            " Number the categories."
        )
    # PRIVACY: the error names no answer.
    if int(array.min()) < 0 or int(array.max()) >= categories:
        raise InvalidValueError(
            f"`value` must hold integers of 0 .. {categories - 1}, since `categories={categories}`, and holds others."
        )
    if array.dtype.kind == "b" and categories > 2:
        raise InvalidValueError(f"`value` holds booleans, but `categories={categories}`. Pass integers.")
    if array.dtype.kind != "b" and categories - 1 > np.iinfo(array.dtype).max:
        raise InvalidValueError(f"`value` has the type {array.dtype}, which cannot hold all {categories} categories.")
    return array


def _share_kept(epsilon: float, categories: int) -> int:
    """How many of 2**128 coins keep the answer; with the others it is replaced by a uniform category, itself included.

    With the share ``(e**epsilon - 1) / (e**epsilon + categories - 1)`` the true answer comes with the probability that
    randomized response gives it.
    """
    context = Context(prec=60, rounding=ROUND_HALF_EVEN, Emin=-999999, Emax=999999, traps=[])
    decay = context.exp(context.minus(Decimal(epsilon)))
    share = context.divide(
        context.subtract(Decimal(1), decay), context.add(Decimal(1), context.multiply(Decimal(categories - 1), decay))
    )
    # PRIVACY: rounded down, one more taken off. Sixty digits are right to 1e-58, and 2**-128 is 3e-39: the share is
    # never above the true one, so that epsilon holds exactly, and less than 2**-126 below it.
    return max(0, int(Fraction(share) * 2**_COIN_BITS) - 1)


def _coins(source: SecretIntegers, share: int, count: int) -> Flags:
    """Flags, true with probability ``share / 2**128`` exactly."""
    high, low = (np.uint64(part) for part in divmod(share, 2**64))
    first, second = source.words(count), source.words(count)
    flags: Flags = (first < high) | ((first == high) & (second < low))
    return flags
