"""Discrete Laplace and discrete Gaussian integers, drawn exactly (Canonne, Kamath and Steinke, 2020)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_dp.releases.secret_integers import Flags, SecretIntegers, Words

Integers = npt.NDArray[np.int64]

MAX_SCALE = 2**43  # an overflow of 64 bits then takes a draw beyond 2**19 scales, probability exp(-2**19)


def discrete_laplace(source: SecretIntegers, scale: int, count: int) -> Integers:
    """Draws independent integers ``z`` with probability proportional to ``exp(-abs(z) / scale)``.

    Algorithm 2 of Canonne, Kamath and Steinke (2020), with a whole number as scale.

    Args:
        source: Where the bits come from.
        scale: At least 1, at most ``MAX_SCALE``.
        count: How many.
    """
    return _until_accepted(count, lambda missing: _laplace_round(source, scale, missing))


def discrete_gaussian(source: SecretIntegers, scale: int, count: int) -> Integers:
    """Draws independent integers ``z`` with probability proportional to ``exp(-z**2 / (2 * scale**2))``.

    Algorithm 3 of Canonne, Kamath and Steinke (2020): a discrete Laplace ``y`` is kept with probability
    ``exp(-a**2 / 2)`` where ``a = abs(abs(y) - scale) / scale``. With ``a = whole + part`` that is
    ``exp(-1/2) ** whole**2 * exp(-part) ** whole * exp(-part**2 / 2)``, so that no number exceeds 64 bits.

    Args:
        source: Where the bits come from.
        scale: At least 1, at most ``MAX_SCALE``.
        count: How many.
    """
    return _until_accepted(count, lambda missing: _gaussian_round(source, scale, missing))


def _until_accepted(count: int, play: Callable[[int], tuple[Integers, Flags]]) -> Integers:
    result = np.zeros(count, dtype=np.int64)
    missing = np.arange(count)
    while missing.size:
        drawn, accepted = play(missing.size)
        result[missing[accepted]] = drawn[accepted]
        missing = missing[~accepted]
    return result


def _laplace_round(source: SecretIntegers, scale: int, count: int) -> tuple[Integers, Flags]:
    low = source.below(scale, count)
    accepted = source.bernoulli_exp_ratio(low, scale)
    size = low.astype(np.int64) + scale * _geometric(source, count)
    negative = source.below(2, count) == 1
    # PRIVACY: one zero, not two: minus nought is refused, or 0 would come twice as often as it should.
    return np.where(negative, -size, size), accepted & ~(negative & (size == 0))


def _geometric(source: SecretIntegers, count: int) -> Integers:
    """How many flags of probability ``exp(-1)`` in a row are true."""
    result = np.zeros(count, dtype=np.int64)
    alive = np.arange(count)
    while alive.size:
        alive = alive[source.bernoulli_exp_times(np.ones(alive.size, dtype=np.uint64))]
        result[alive] += 1
    return result


def _gaussian_round(source: SecretIntegers, scale: int, count: int) -> tuple[Integers, Flags]:
    drawn = discrete_laplace(source, scale, count)
    whole, part = np.divmod(np.abs(np.abs(drawn) - scale), scale)
    wholes, parts = whole.astype(np.uint64), part.astype(np.uint64)
    accepted = source.bernoulli_exp_times(wholes**2, (np.ones(count, dtype=np.uint64), 2))
    accepted &= source.bernoulli_exp_times(wholes, (parts, scale))
    accepted &= _bernoulli_exp_half_square(source, parts, scale)
    return drawn, accepted


def _bernoulli_exp_half_square(source: SecretIntegers, parts: Words, scale: int) -> Flags:
    """True with probability ``exp(-(parts / scale)**2 / 2)``; half a square is three independent flags."""

    def trial(playing: npt.NDArray[np.intp]) -> Flags:
        first: Flags = source.below(scale, playing.size) < parts[playing]
        second: Flags = source.below(scale, playing.size) < parts[playing]
        third: Flags = source.below(2, playing.size) == 1
        return first & second & third

    return source.bernoulli_exp(len(parts), trial)
