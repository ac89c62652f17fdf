"""Cumulant functions of composed losses on a ladder of tilts, and the Renyi bounds that follow from them.

``K(c) = log E_P[exp(c L)]`` is ``c`` times the Renyi divergence of order ``c + 1``. It is evaluated for many tilts at
once, since the search for the best order and the bounds of aliases need the neighbours of the best tilt anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from lightning_dp.accounting.profile.losses import AtomicLoss, Floats
from lightning_dp.accounting.profile.sampled_gaussian import Step

RUNG = 0.2  # distance of tilts, in the logarithm
_BELOW, _ABOVE = 9, 7  # rungs on both sides of the first guess
_SPARE = 4  # rungs that are wanted above the best order, and twice as many below
_FARTHEST = 180  # rungs from 1: tilts from 1e-16 to 1e16
_MOVES = 60
_SAFE = 600.0
_LEAST_SIGMA = 0.02  # with less noise the lattice takes over

Part = Step | AtomicLoss


@dataclass(frozen=True)
class Parts:
    """What is integrated on one line: steps and discrete losses with their counts, and a plain Gaussian.

    Attributes:
        parts: Sampled steps and discrete losses.
        counts: How often each occurs.
        rho: ``mu^2 / 2`` of the plain Gaussian, whose cumulant function is ``rho c (c + 1)``.
    """

    parts: tuple[Part, ...]
    counts: tuple[int, ...]
    rho: float

    @property
    def infinite(self) -> float:
        """Upper bound of the probability that is counted as infinite loss."""
        return sum(n * part.infinite for part, n in zip(self.parts, self.counts, strict=True)) * (1 + 1e-12)

    @property
    def truly_infinite(self) -> float:
        """Lower bound of the probability that the loss is infinite."""
        log_finite = sum(
            n * math.log1p(-part.infinite) if part.infinite < 1 else -math.inf
            for part, n in zip(self.parts, self.counts, strict=True)
            if isinstance(part, AtomicLoss) and n
        )
        return -math.expm1(log_finite) * (1 - 1e-12)

    @property
    def is_smooth(self) -> bool:
        """Whether the characteristic function decays, and the noise is large enough for trapezoid sums."""
        sigmas = [part.loss.sigma for part in self.parts if isinstance(part, Step)]
        return min(sigmas) >= _LEAST_SIGMA if sigmas else self.rho > 0

    @property
    def may_split(self) -> bool:
        """Whether rare hits may be told from the rest."""
        return any(isinstance(part, Step) and part.loss.direction != "add" for part in self.parts)

    @property
    def unsampled_mu(self) -> float | None:
        """Distance over noise of the Gaussian that the steps compose to without sampling; None with discrete losses."""
        total = 2 * self.rho
        for part, count in zip(self.parts, self.counts, strict=True):
            if isinstance(part, AtomicLoss):
                return None
            distance = 2 if part.loss.direction == "replace" else 1
            total += count * (distance / part.loss.sigma) ** 2
        return math.sqrt(total)

    @cached_property
    def is_split(self) -> bool:
        """Whether only losses with at least one hit are integrated."""
        return any(isinstance(part, Step) and part.is_split for part in self.parts)

    def with_steps(self, change: Callable[[Step], Step]) -> Parts:
        """The same with every sampled step changed."""
        return replace(self, parts=tuple(change(part) if isinstance(part, Step) else part for part in self.parts))

    def without_tail(self, log_delta: float, share: float = 1.0) -> Parts:
        """The same with the largest losses of sampled steps counted as infinite, at most ``1e-10`` of delta."""
        log_share = log_delta + math.log(1e-10) - math.log(sum(self.counts) + 1)
        log_share = float(math.floor(log_share))  # in steps, so that neighbouring questions share what is cached
        return self.with_steps(lambda step: step.without_tail(log_share, share))

    def split_for(self, epsilon: float, log_target: float) -> tuple[Parts, float] | None:
        """Splits each sampled step's losses so that without any hit the total hardly exceeds ``epsilon``.

        A rarely sampled record leaves a sharp peak in the distribution of the loss, whose transform decays too slowly
        for the contour. The peak lies below epsilon, so that it adds next to nothing to delta, and can be left out.

        Returns:
            The split parts, and the logarithm of the bound of delta without hits (Chernoff), below ``log_target``;
            None if no split achieves that.
        """
        orders = (30.0, 60.0, 120.0, 240.0, 480.0)
        for share in (1.3, 1.5, 2.0, 3.0, 5.0, 9.0, 16.0, 30.0, 60.0):
            split = self.with_steps(lambda step, limit=epsilon / share: step.split_at(limit))  # type: ignore[misc]
            bulk = split.with_steps(lambda step: step.bulk)
            log_missed = min(_log_missed(bulk, order / epsilon, order) for order in orders)
            if log_missed <= log_target:
                return split, log_missed
        return None

    def cumulants(self, tilts: Floats) -> tuple[Floats, Floats]:
        """``K`` and ``K'`` of all steps together, ``(tilts,)`` each."""
        return self.composed(tilts, *self.single_cumulants(tilts))

    def composed(self, tilts: Floats, values: Floats, means: Floats) -> tuple[Floats, Floats]:
        """``K`` and ``K'`` of all steps from those of one step of each kind."""
        counts = np.asarray(self.counts, dtype=np.float64)
        plain = self.rho * tilts * (tilts + 1)
        return values @ counts + plain, means @ counts + self.rho * (2 * tilts + 1)

    def single_cumulants(self, tilts: Floats) -> tuple[Floats, Floats]:
        """The same for one step of each kind, ``(tilts, parts)`` each."""
        if not self.parts:
            return np.zeros((len(tilts), 0)), np.zeros((len(tilts), 0))
        sums = _node_sums(self.parts, float(tilts.max()))
        return sums.cumulants(tilts)


def _log_missed(bulk: Parts, tilt: float, order: float) -> float:
    """Chernoff's bound at one tilt; 0 where that is too strong for sums over nodes."""
    try:
        return min(0.0, float(bulk.cumulants(np.array([tilt]))[0][0]) - order)
    except ArithmeticError:
        return 0.0


@dataclass(frozen=True, eq=False)
class _NodeSums:
    """Nodes of all parts side by side, each ``(nodes,)``, with the index at which each part starts."""

    base: Floats
    log_base: Floats
    density: Floats
    loss: Floats
    starts: np.ndarray[tuple[int], np.dtype[np.intp]]
    missing: Floats

    def cumulants(self, tilts: Floats) -> tuple[Floats, Floats]:
        exponents = self.density + tilts[:, None] * self.loss
        if exponents.max() < _SAFE:
            grown = np.expm1(exponents)
            totals = np.add.reduceat(self.base * grown, self.starts, axis=1) - self.missing
            grown += 1
            grown *= self.base * self.loss
            means = np.add.reduceat(grown, self.starts, axis=1) / (1 + totals)
            return np.log1p(totals), means
        return self._large_cumulants(exponents)

    def _large_cumulants(self, exponents: Floats) -> tuple[Floats, Floats]:
        sizes = np.diff(np.append(self.starts, len(self.base)))
        far = exponents >= _SAFE  # there the weight alone may leave the range of floats, but not its product
        grown = np.where(far, 0.0, np.expm1(np.minimum(exponents, _SAFE))) * self.base
        exponents += self.log_base
        grown += np.where(far, np.exp(np.minimum(exponents, _SAFE)), 0.0)
        small = np.add.reduceat(grown, self.starts, axis=1) - self.missing
        tops = np.maximum(np.maximum.reduceat(exponents, self.starts, axis=1), 0.0)
        weights = np.exp(exponents - np.repeat(tops, sizes, axis=1))
        totals = np.add.reduceat(weights, self.starts, axis=1)
        means = np.add.reduceat(weights * self.loss, self.starts, axis=1) / totals
        values = np.where(small < 1e3, np.log1p(np.minimum(small, 1e3)), tops + np.log(totals))
        return values, means


def _node_sums(parts: tuple[Part, ...], largest: float) -> _NodeSums:
    arrays = [_part_nodes(part, largest) for part in parts]
    if len(arrays) == 1:
        base, log_base, density, loss, missing = arrays[0]
        return _NodeSums(base, log_base, density, loss, np.zeros(1, dtype=np.intp), np.array([missing]))
    base, log_base, density, loss = (np.concatenate(column) for column in list(zip(*arrays, strict=True))[:4])
    starts = np.cumsum([0, *(len(array[0]) for array in arrays[:-1])]).astype(np.intp)
    return _NodeSums(base, log_base, density, loss, starts, np.array([array[4] for array in arrays]))


@lru_cache(maxsize=2048)
def _part_nodes(part: Part, largest: float) -> tuple[Floats, Floats, Floats, Floats, float]:
    """Weights, their logarithms, log density and loss at the nodes, and the probability that is not in them."""
    if isinstance(part, AtomicLoss):
        with np.errstate(divide="ignore"):
            return part.masses, np.log(part.masses), np.zeros_like(part.losses), part.losses, part.infinite
    nodes = part.nodes(largest)
    return np.exp(nodes.log_base), nodes.log_base, nodes.density, nodes.loss, nodes.missing


@dataclass(frozen=True, eq=False)
class Ladder:
    """Cumulants at equidistant ``log c`` around the best order of a Renyi bound.

    Attributes:
        tilts: The tilts ``c``, increasing, ``(rungs,)``.
        values: ``K(c)``, ``(rungs,)``.
        means: ``K'(c)``, ``(rungs,)``.
        best: Index of the rung at or just above the best order.
        single_values: ``K(c)`` of one step of each kind, ``(rungs, parts)``.
        single_means: ``K'(c)`` of one step of each kind, ``(rungs, parts)``.
    """

    tilts: Floats
    values: Floats
    means: Floats
    best: int
    single_values: Floats
    single_means: Floats

    def renyi_epsilon(self, log_delta: float) -> float:
        """Smallest epsilon over the orders of the ladder (Canonne, Kamath and Steinke, 2020, Proposition 12)."""
        corrections = self.tilts * np.log1p(1 / self.tilts) + np.log1p(self.tilts) + log_delta
        return max(0.0, float(((self.values - corrections) / self.tilts).min()))

    def renyi_log_delta(self, epsilon: float) -> float:
        """The same bound for delta, as a logarithm."""
        corrections = self.tilts * (epsilon + np.log1p(1 / self.tilts)) + np.log1p(self.tilts)
        return min(0.0, float((self.values - corrections).min()))


def ladder_for_delta(parts: Parts, log_delta: float) -> Ladder:
    """The ladder around the order that is best at ``delta``."""
    guess = math.sqrt(-log_delta / _rough_rho(parts))

    def slopes(tilts: Floats, values: Floats, means: Floats) -> Floats:
        return tilts * means - values + np.log1p(tilts) + log_delta

    return _ladder(parts, guess, slopes)


def ladder_for_epsilon(parts: Parts, epsilon: float) -> Ladder:
    """The ladder around the order that is best at ``epsilon``."""
    rho = _rough_rho(parts)
    guess = max((epsilon / rho - 1) / 2, 1 / math.sqrt(rho + epsilon), 1 / (epsilon + 1))

    def slopes(tilts: Floats, values: Floats, means: Floats) -> Floats:
        return means - epsilon - np.log1p(1 / tilts)

    return _ladder(parts, guess, slopes)


def _rough_rho(parts: Parts) -> float:
    """Half the variance of the loss, roughly."""
    rho = parts.rho
    for part, count in zip(parts.parts, parts.counts, strict=True):
        if isinstance(part, AtomicLoss):
            rho += count * float(part.masses @ np.minimum(part.losses**2, np.abs(part.losses))) / 2
        else:
            q, sigma = part.loss.sampling_rate, part.loss.sigma
            rho += count * min(q * q * math.expm1(min(sigma**-2, 50.0)), q / sigma**2) / 2
    return max(rho, 1e-290)


def _ladder(parts: Parts, guess: float, slopes: Callable[[Floats, Floats, Floats], Floats]) -> Ladder:
    middle = max(-_FARTHEST, min(_FARTHEST, round(math.log(guess) / RUNG)))
    ladder, farthest = None, _FARTHEST
    for _ in range(_MOVES):
        tilts = np.exp(RUNG * np.arange(middle - _BELOW, middle + _ABOVE + 1))
        try:
            singles = parts.single_cumulants(tilts)
        except ArithmeticError:  # too strong a tilt for sums over nodes; weaker ones give valid bounds too
            if ladder is not None:
                break
            farthest = middle = middle - 2 * _SPARE
            continue
        values, means = parts.composed(tilts, *singles)
        rising = slopes(tilts, values, means) >= 0
        best = int(np.argmax(rising)) if rising.any() else len(tilts)
        ladder = Ladder(tilts, values, means, min(best, len(tilts) - _SPARE), *singles)
        if best < 2 * _SPARE - 2 and middle > -_FARTHEST:
            middle -= 2 * _SPARE if best else _BELOW + _ABOVE
        elif best > len(tilts) - _SPARE and middle < farthest:
            middle = min(farthest, middle + (_SPARE if best < len(tilts) else _BELOW + _ABOVE - _SPARE))
        else:
            break
    if ladder is None:
        raise ArithmeticError("No tilt has few enough nodes.")
    return ladder
