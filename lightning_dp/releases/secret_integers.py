"""Exact random integers from the bits of a secret stream: no floating point, hence no rounding to learn from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_dp.sampling import KeyStream

Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

_BLOCK = 512  # words that are encrypted at a time, at least


class SecretIntegers:
    """Uniform integers, each from bits of the stream that serve nothing else.

    Args:
        key: 32 secret bytes, used for one release only.
    """

    def __init__(self, key: bytes) -> None:
        self._stream = KeyStream(key, "release")
        self._stretches = 0
        self._ready = np.empty(0, dtype=np.uint64)

    def words(self, count: int) -> Words:
        """``count`` uniform 64-bit words, never handed out before."""
        if count > len(self._ready):
            fresh = self._stream.words(self._stretches, max(count, _BLOCK))
            self._stretches += 1
            self._ready = np.concatenate([self._ready, fresh])
        taken, self._ready = self._ready[:count].copy(), self._ready[count:]
        return taken

    def below(self, bound: int, count: int) -> Words:
        """``count`` uniform integers of ``0 .. bound - 1``; ``bound`` is at most ``2**63``."""
        if bound == 1:
            return np.zeros(count, dtype=np.uint64)
        # PRIVACY: words beyond the last whole multiple of `bound` are drawn again; they would favour small results.
        largest = np.uint64(2**64 - 1 - 2**64 % bound)
        words = self.words(count)
        again = np.flatnonzero(words > largest)
        while again.size:
            words[again] = self.words(again.size)
            again = again[words[again] > largest]
        return words % np.uint64(bound)

    def bernoulli_exp(self, count: int, trial: Callable[[npt.NDArray[np.intp]], Flags]) -> Flags:
        """Independent flags, number ``i`` true with probability ``exp(-gamma[i])`` exactly, ``gamma[i]`` in [0, 1].

        The series of exp, played as a game (Canonne, Kamath and Steinke, 2020, Algorithm 1; after von Neumann, 1951).

        Args:
            count: How many.
            trial: Given indices, draws fresh flags that are true with probability ``gamma`` at these indices.
        """
        result = np.zeros(count, dtype=np.bool_)
        playing, turn = np.arange(count), 1
        while playing.size:
            goes_on = trial(playing) & (self.below(turn, playing.size) == 0)
            result[playing[~goes_on]] = turn % 2 == 1
            playing, turn = playing[goes_on], turn + 1
        return result

    def bernoulli_exp_ratio(self, numerators: Words, denominator: int) -> Flags:
        """Independent flags, true with probability ``exp(-numerators / denominator)`` exactly.

        Args:
            numerators: At least 0, at most ``denominator``.
            denominator: At most ``2**63``.
        """
        return self.bernoulli_exp(
            len(numerators), lambda playing: self.below(denominator, playing.size) < numerators[playing]
        )

    def bernoulli_exp_times(self, times: Words, gamma: tuple[Words, int] | None = None) -> Flags:
        """Independent flags, true with probability ``exp(-gamma * times)`` exactly.

        Args:
            times: Whole numbers, at least 0.
            gamma: Numerators, one for each flag, and their denominator; 1 if ``None``.
        """
        alive = np.arange(len(times))
        turn = 0
        result = np.zeros(len(times), dtype=np.bool_)
        while alive.size:
            through = times[alive] <= turn
            result[alive[through]] = True
            alive = alive[~through]
            if gamma is None:
                passed = self.bernoulli_exp(alive.size, lambda playing: np.ones(playing.size, dtype=np.bool_))
            else:
                passed = self.bernoulli_exp_ratio(gamma[0][alive], gamma[1])
            alive, turn = alive[passed], turn + 1
        return result
