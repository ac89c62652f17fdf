"""How many more releases a budget allows."""

from __future__ import annotations

import math

import numpy as np

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency, directions
from lightning_dp.accounting.budget import asked_budget
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Mechanism
from lightning_dp.accounting.mechanisms.base import SingleMechanism, checked
from lightning_dp.accounting.profile import Floats, RunningEpsilon
from lightning_dp.accounting.search import MOST_UPDATES, Bracket, Budget, Knob, Meter, search

_MARGIN = 1e-6  # relative distance from the budget at which a reading is taken anew
_RENYI_SLACK = 1.15  # a Renyi bound allows about so many times fewer updates
_RUNG, _RUNGS = 0.2, 10  # distance of the orders in the logarithm, and their number
_FIRST = 1000  # updates to try where it tells nothing


def updates_left(
    update: Mechanism,
    *,
    epsilon: float,
    delta: float,
    spent: Mechanism | Ledger | None = None,
    limit: int | None = None,
    adjacency: Adjacency | None = None,
) -> int:
    """Largest number of updates that keeps the whole within a budget.

    Args:
        update: What one update executes.
        epsilon: The budget, greater than 0.
        delta: In (0, 1).
        spent: What was released about the same records before; a mechanism, or a ledger, whose adjacency and unit are
            kept; nothing if ``None``.
        limit: Stop looking here, for example at the number of updates that are planned; 10 billion if ``None``.
        adjacency: Which data sets are neighbours; that of the ledger, or ``"add_remove"``, if ``None``.

    Returns:
        The number ``n``, at most ``limit``: ``spent + n * update`` costs at most ``epsilon`` at ``delta``, and one
        update more would cost more; 0 if nothing fits.

    Raises:
        InvalidValueError: An argument is out of range.
        IncomparableError: The ledger is for another adjacency.
        LedgerError: Mechanisms in the ledger were chosen from outputs, so that no fixed plan continues it.

    Example:
        >>> from lightning_dp import Gaussian, PoissonSampled
        >>> updates_left(PoissonSampled(Gaussian(1.0), 0.01), epsilon=2, delta=1e-5)
        1202
    """
    update = checked("update", update)
    budget = asked_budget(epsilon, delta, spent, adjacency)
    most = MOST_UPDATES if limit is None else _validate.integer("limit", limit, minimum=0)
    spent_epsilon = budget.spent_epsilon
    if most == 0 or spent_epsilon >= budget.epsilon:
        return 0
    found = search_updates(Meter(budget, spent_epsilon), update, most, guess=None if limit is None else most)
    return 0 if found.fits is None else int(found.fits.value)


def search_updates(meter: Meter, update: Mechanism, most: int, *, guess: int | None = None) -> Bracket:
    """The largest number of updates that fits, up to ``most``.

    Args:
        meter: The budget.
        update: What one update executes.
        most: At least 1.
        guess: The number to try first; what Renyi orders tell if ``None``.
    """
    if meter.budget.spent.rows_per_unit == 1:
        meter = _CountMeter(meter)
    guess = guess or min(_renyi_guess(meter.budget, update), most)
    knob = Knob(
        run=lambda count: int(count) * update,
        place=lambda count: math.log(count) / 2,
        value=lambda place: min(max(math.floor(math.exp(2 * place)), 1), most),
        cheapest=1,
        dearest=most,
        whole=True,
    )
    return search(meter, knob, min(guess, most))


class _CountMeter(Meter):
    """A meter for runs that differ in nothing but how often each mechanism occurs: their readings share one line."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter.budget, meter.spent_epsilon)
        self._mechanisms: tuple[SingleMechanism, ...] = ()
        self._running: RunningEpsilon | None = None

    def epsilon(self, run: Mechanism) -> float:
        """See :meth:`Meter.epsilon`."""
        budget = self.budget
        phases = (budget.spent.mechanism + run).phases
        mechanisms = tuple(single for single, _ in phases)
        if self._running is None or mechanisms != self._mechanisms:
            adjacency = budget.spent.adjacency
            losses = [[single.loss(adjacency, way) for single in mechanisms] for way in directions(adjacency)]
            self._mechanisms, self._running = mechanisms, RunningEpsilon(losses)
        value = self._running.epsilon([count for _, count in phases], budget.delta)
        # What decides is the reading that everyone else takes; the two differ by less than the margin.
        return super().epsilon(run) if abs(value - budget.epsilon) <= _MARGIN * budget.epsilon else value


def _renyi_guess(budget: Budget, update: Mechanism) -> int:
    """About how many updates fit, from Renyi orders up to the one that is best for a Gaussian of this epsilon."""
    distance = -math.log(budget.delta)
    farthest = math.sqrt(distance) / (math.sqrt(distance + budget.epsilon) - math.sqrt(distance))
    tilts = farthest * np.exp(-_RUNG * np.arange(_RUNGS))
    adjacency = budget.spent.adjacency
    each, spent = (_cumulants(run, adjacency, tilts) for run in (update, budget.spent.mechanism))
    left = tilts * (budget.epsilon + np.log1p(1 / tilts)) + np.log1p(tilts) - distance - spent
    usable = (each > 0) & np.isfinite(each) & (left > 0)
    if not usable.any():
        return _FIRST
    return max(1, round(min(_RENYI_SLACK * float((left[usable] / each[usable]).max()), MOST_UPDATES)))


def _cumulants(run: Mechanism, adjacency: Adjacency, tilts: Floats) -> Floats:
    """About the Renyi divergences of orders ``1 + tilts``, times the tilts; infinite where sums take too many nodes."""
    composed = run.profile(adjacency).directions[0]
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            return composed.parts().cumulants(tilts)[0]
    except ArithmeticError:
        return np.full(len(tilts), np.inf)
