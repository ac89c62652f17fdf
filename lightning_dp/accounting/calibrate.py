"""The noise and the sampling rate that use a budget up."""

from __future__ import annotations

import math

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.budget import asked_budget
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Gaussian, Mechanism, PoissonSampled
from lightning_dp.accounting.search import LANDING, Bracket, Budget, Knob, Meter, search
from lightning_dp.errors import CalibrationError

LEAST_NOISE, MOST_NOISE = 2.0**-10, 1e9  # noise multipliers searched
LEAST_RATE = 1e-9  # sampling rates searched, up to 1
CLOSE = 0.999  # share of the target that counts as reaching it at an end of the range
_LARGEST_EXPONENT = 700.0


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    num_updates: int,
    spent: Mechanism | Ledger | None = None,
    adjacency: Adjacency | None = None,
) -> float:
    """Smallest noise multiplier with which a run stays within ``(epsilon, delta)``.

    Args:
        epsilon: Target for everything together, finite and above 0.
        delta: In (0, 1).
        sampling_rate: Probability of each record to take part in an update, in (0, 1].
        num_updates: Noisy updates still to come, at least 1.
        spent: What was released about the same records before; a mechanism, or a ledger, whose adjacency and unit are
            kept; nothing if ``None``.
        adjacency: Which data sets are neighbours; that of the ledger, or ``"add_remove"``, if ``None``.

    Returns:
        Noise over sensitivity; the run's epsilon is at most the target and above 0.9999 of it.

    Raises:
        CalibrationError: No noise multiplier reaches the target; the message gives the reachable range.
        InvalidValueError: An argument is out of range.
        IncomparableError: The ledger is for another adjacency.
        LedgerError: Mechanisms in the ledger were chosen from outputs, so that no fixed plan continues it.

    Example:
        >>> sigma = calibrate_noise_multiplier(epsilon=3.0, delta=1e-5, sampling_rate=0.01, num_updates=1000)
        >>> round(sigma, 4)
        0.8136
    """
    budget = asked_budget(epsilon, delta, spent, adjacency)
    rate = _validate.probability("sampling_rate", sampling_rate)
    return solve_noise(open_meter(budget), rate, _validate.integer("num_updates", num_updates, 1))


def open_meter(budget: Budget) -> Meter:
    """A meter for what is left of the budget.

    Raises:
        CalibrationError: Nothing is left.
    """
    already = budget.spent_epsilon
    if already >= budget.epsilon:
        raise CalibrationError(
            f"`epsilon={budget.epsilon:g}` at `delta={budget.delta:g}` cannot be kept: what is already spent has"
            f" epsilon {already:.6g}. Choose a target above {already:.6g}."
        )
    return Meter(budget, already)


def solve_noise(meter: Meter, sampling_rate: float, num_updates: int) -> float:
    """The smallest noise multiplier that fits.

    Raises:
        CalibrationError: None fits, or each does.
    """
    knob = Knob(
        run=lambda sigma: num_updates * PoissonSampled(Gaussian(sigma), sampling_rate),
        place=lambda sigma: math.log(_step_mu(sampling_rate, sigma)),
        value=lambda place: _noise_for(sampling_rate, math.exp(place)),
        cheapest=MOST_NOISE,
        dearest=LEAST_NOISE,
    )
    guess = _noise_for(sampling_rate, _step_left(meter, num_updates))
    found = search(meter, knob, min(max(guess, LEAST_NOISE), MOST_NOISE))
    return reached(
        meter.budget,
        found,
        f"with noise multipliers from {LEAST_NOISE:.3g} to {MOST_NOISE:.3g}",
        "updates or sampling rate",
    )


def search_rate(
    meter: Meter, noise_multiplier: float, num_updates: int, *, least: float = LEAST_RATE, most: float = 1.0
) -> Bracket:
    """The largest sampling rate from ``least`` to ``most`` that fits."""
    update = Gaussian(noise_multiplier)
    knob = Knob(
        run=lambda rate: num_updates * PoissonSampled(update, rate),
        place=math.log,
        value=lambda place: min(max(math.exp(place), least), most),
        cheapest=least,
        dearest=most,
    )
    return search(meter, knob, min(max(rate_guess(meter, noise_multiplier, num_updates), least), most))


def rate_guess(meter: Meter, noise_multiplier: float, num_updates: int) -> float:
    """The sampling rate that the Gaussian limit tells."""
    return _step_left(meter, num_updates) / _step_mu(1.0, noise_multiplier, capped=False)


def search_batch(meter: Meter, noise_multiplier: float, num_updates: int, num_records: int, most: int) -> Bracket:
    """The largest expected batch size up to ``most`` that fits."""
    update = Gaussian(noise_multiplier)
    knob = Knob(
        run=lambda batch: num_updates * PoissonSampled(update, batch / num_records),
        place=math.log,
        value=lambda place: min(max(math.floor(math.exp(place)), 1), most),
        cheapest=1,
        dearest=most,
        whole=True,
    )
    guess = math.floor(rate_guess(meter, noise_multiplier, num_updates) * num_records)
    return search(meter, knob, min(max(guess, 1), most))


def reached(budget: Budget, found: Bracket, searched: str, others: str) -> float:
    """The value that fits.

    Raises:
        CalibrationError: None fits, or each does.
    """
    if found.fits is not None and found.exceeds is not None:
        return found.fits.value
    if found.fits is not None and found.fits.epsilon >= CLOSE * budget.epsilon:
        return found.fits.value
    if found.fits is not None:
        relation, side, end = "at most", "below", found.fits.epsilon
    else:
        relation, side, end = "at least", "above", math.inf if found.exceeds is None else found.exceeds.epsilon
    target = f"`epsilon={budget.epsilon:g}` at `delta={budget.delta:g}` is out of reach"
    if math.isinf(end):
        raise CalibrationError(f"{target}: {searched} epsilon is infinite. Choose a `noise_multiplier` well above 0.")
    raise CalibrationError(
        f"{target}: {searched} the run has epsilon {relation} {end:.6g}. Choose a target {side} {end:.6g}, or change"
        f" the {others}."
    )


def _step_left(meter: Meter, num_updates: int) -> float:
    """The ``mu`` that one update may have in the limit."""
    return meter.left * (1 - LANDING / 4) / math.sqrt(num_updates) / meter.budget.spent.reach


def _step_mu(sampling_rate: float, sigma: float, *, capped: bool = True) -> float:
    """``mu / sqrt(T)`` of the limit of ``T`` updates, at most that without sampling."""
    exponent = min(sigma**-2, _LARGEST_EXPONENT) if sigma > 0 else _LARGEST_EXPONENT
    sampled = sampling_rate * math.sqrt(math.expm1(exponent))
    return min(sampled, 1 / sigma) if capped else sampled


def _noise_for(sampling_rate: float, step_mu: float) -> float:
    """The noise multiplier of which :func:`_step_mu` is the given one."""
    sampled = 1 / math.sqrt(math.log1p((step_mu / sampling_rate) ** 2))
    return min(sampled, 1 / step_mu)
