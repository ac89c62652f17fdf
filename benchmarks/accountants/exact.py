"""Epsilon to fifteen digits, from an integral in 40-digit arithmetic without any cleverness, and the cases it is for.

With ``G(u) = log E[(P/Q)^u]`` of one update under the law Q without the record, summed over all updates into ``K``,

    delta(eps) = 1/(2 pi) * integral of exp(K(1+z) - z eps) / (z (z+1)) dt,    z = c + it,    any c > 0.

Both integrals, over outputs in ``G`` and over t, are trapezoid sums, whose error falls exponentially in the number of
nodes. :func:`exact_epsilon` doubles it until nothing changes. The direction is that of a removed record,
which dominates in all cases here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import mpmath as mp

Phases = tuple[tuple[float, float, int], ...]

FILE = Path(__file__).parent / "exact.json"
CASES: dict[str, tuple[Phases, float]] = {
    "A": (((0.01, 1.0, 1000),), 1e-5),
    "B": (((0.004, 0.8, 15_000),), 1e-5),
    "C": (((256 / 60_000, 1.1, 14_062),), 1e-5),
    "D": (((0.001, 0.5, 100_000),), 1e-6),
    "E": (((1.0, 20.0, 100),), 1e-5),
    "F": (((0.5, 5.0, 200),), 1e-6),
    "X1": (((1e-5, 1.0, 1_000_000),), 1e-6),
    "X3": (((0.1, 0.6, 500),), 1e-5),
    "X8": (((0.9, 3.0, 100),), 1e-5),
    "3 phases": (((0.01, 1.5, 500), (0.01, 1.0, 1000), (0.02, 0.8, 300)), 1e-5),
    "100 phases": (tuple((0.01, 2 * 0.4 ** (k / 99), 20) for k in range(100)), 1e-5),
}


def truths() -> dict[str, float]:
    """The stored epsilon of every case."""
    return {name: float(value) for name, value in json.loads(FILE.read_text()).items()}


def renew(names: Iterable[str]) -> None:
    """Computes the stored epsilon of the named cases again, seconds each, and minutes for a hundred phases."""
    found = json.loads(FILE.read_text())
    for name in names:
        found[name] = mp.nstr(exact_epsilon(*CASES[name]), 15)
        print(f"{name:<12}{found[name]}", flush=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


def exact_epsilon(phases: Phases, delta: float) -> mp.mpf:
    """The epsilon at ``delta``, from ever finer spacings.

    Half the spacing squares the error, so that of two results that agree to eight digits the later one has fifteen.
    """
    with mp.workdps(40):
        # Somewhat below the saddle point, where delta falls fast enough with epsilon for the aliases to vanish soon.
        c = _saddle(phases, delta) / 1.5
        fineness, before, found = 2, mp.inf, _epsilon(phases, delta, c, 1)
        while not abs(found - before) <= 1e-8 * before < mp.inf:
            before, found = found, _epsilon(phases, delta, c, fineness)
            fineness *= 2
        return found


def _epsilon(phases: Phases, delta: float, c: float, fineness: int) -> mp.mpf:
    # The aliases of a sum over multiples of h are delta(eps + 2 pi m / h) exp(2 pi m c / h) for all m but 0. Those with
    # m < 0 are at most the exponential; those with m > 0 vanish too as h falls, how fast depends on the loss.
    spacing = mp.mpf(2 * math.pi * c / (math.log(1 / delta) + 50) / fineness)
    terms = _terms(phases, mp.mpf(c), spacing, mp.mpf(1) / (8 + 2 * fineness))

    def excess(epsilon: mp.mpf) -> mp.mpf:
        total = mp.fsum((value * mp.exp(-z * epsilon)).real for z, value in terms) * spacing / mp.pi
        return mp.log(total / delta)

    above = mp.mpf(_chernoff(phases, c, delta))
    if excess(above) >= 0:  # aliases only
        return mp.inf
    return mp.findroot(excess, (mp.mpf(0), above), solver="illinois", tol=1e-30, maxsteps=200)


def _terms(phases: Phases, c: mp.mpf, spacing: mp.mpf, step: mp.mpf) -> list[tuple[mp.mpc, mp.mpc]]:
    """``z`` and ``exp(K(1+z)) / (z(z+1))`` along the line, until they are too small to matter."""
    grids = [_Grid(q, sigma, float(c), step) for q, sigma, _ in phases]
    terms: list[tuple[mp.mpc, mp.mpc]] = []
    while len(terms) < 20 or abs(terms[-1][1]) > abs(terms[0][1]) * mp.mpf(10) ** -22:
        z = mp.mpc(c, len(terms) * spacing)
        powers = [count * mp.log(grid.moment(spacing)) for grid, (_, _, count) in zip(grids, phases, strict=True)]
        terms.append((z, mp.exp(mp.fsum(powers)) / (z * (z + 1)) / (1 if terms else 2)))
    return terms


class _Grid:
    """``E[(P/Q)^(1+z)]`` of one update at z = c, c + ih, c + 2ih, ..., over a grid of outputs in units of sigma."""

    def __init__(self, q: float, sigma: float, c: float, step: mp.mpf) -> None:
        low, high = -13 - c / sigma, 13 + (2 + c) / sigma
        points = [k * step for k in range(int(low / step), int(high / step) + 1)]
        rate, noise = mp.mpf(q), mp.mpf(sigma)
        self.loss = [mp.log1p(rate * mp.expm1(x / noise - 1 / (2 * noise**2))) for x in points]
        self.powers = [
            mp.mpc(mp.exp(-x * x / 2 + (1 + mp.mpf(c)) * loss) * step / mp.sqrt(2 * mp.pi))
            for x, loss in zip(points, self.loss, strict=True)
        ]
        self.turn: list[mp.mpc] = []

    def moment(self, spacing: mp.mpf) -> mp.mpc:
        """The moment at the present z; goes on to the next one."""
        result = mp.fsum(self.powers)
        self.turn = self.turn or [mp.expj(spacing * loss) for loss in self.loss]
        self.powers = [power * turn for power, turn in zip(self.powers, self.turn, strict=True)]
        return result


def _cumulant(phases: Phases, c: float) -> float:
    with mp.workdps(30):
        step = mp.mpf(1) / 4
        return float(mp.fsum(n * mp.log(mp.fsum(_Grid(q, s, c, step).powers).real) for q, s, n in phases))


def _chernoff(phases: Phases, c: float, delta: float) -> float:
    """An upper bound of epsilon through the one order ``1 + c``."""
    return (_cumulant(phases, c) - math.log(delta) - math.log1p(c) + c * math.log(c / (1 + c))) / c


def _saddle(phases: Phases, delta: float) -> float:
    """The order at which that bound is smallest, to a tenth; any other would do, with more nodes."""
    orders = [1.1**k for k in range(-20, 51)]
    low, high = 0, len(orders) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if _chernoff(phases, orders[left], delta) < _chernoff(phases, orders[right], delta):
            high = right
        else:
            low = left
    return orders[(low + high) // 2]
