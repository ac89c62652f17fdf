"""The calculator: of budget, noise, sampling rate and updates, the one that is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from lightning_dp import _validate
from lightning_dp.accounting.adjacency import Adjacency
from lightning_dp.accounting.budget import asked_spent
from lightning_dp.accounting.calibrate import (
    CLOSE,
    LEAST_RATE,
    open_meter,
    reached,
    search_batch,
    search_rate,
    solve_noise,
)
from lightning_dp.accounting.guarantee import format_epsilon
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Composition, Gaussian, Mechanism, PoissonSampled
from lightning_dp.accounting.remaining import search_updates
from lightning_dp.accounting.search import MOST_UPDATES, Budget, Knob, Meter, Spent, search
from lightning_dp.errors import CalibrationError, InvalidValueError

_T = TypeVar("_T")

_WHOLE = 1e-9  # what is this close above a whole number is that number


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Settings of a training run and what they cost; they fit together.

    Attributes:
        epsilon: What the run costs together with what was spent before, at ``delta``; never below the true value.
        delta: Of the guarantee.
        noise_multiplier: Standard deviation of the noise over the bound of one record's contribution.
        sampling_rate: Probability of each record to be in an update.
        num_updates: Noisy updates.
        epochs: The same in epochs, of ``updates_per_epoch`` updates each.
        batch_size: Expected number of records in an update, if it was asked for.
        num_records: Records in the data set, if it was given.
        adjacency: Which data sets are neighbours.
        solved_for: Name of the setting that was left out.
        spent_epsilon: Epsilon of what was spent before, at ``delta``.
        mechanism: The updates as one mechanism, without what was spent before.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sampling_rate: float
    num_updates: int
    epochs: float
    batch_size: int | None
    num_records: int | None
    adjacency: Adjacency
    solved_for: str
    spent_epsilon: float
    mechanism: Mechanism

    @property
    def updates_per_epoch(self) -> int:
        """Updates that the training loop counts as one epoch: one over the sampling rate, rounded up."""
        return updates_per_epoch(self.sampling_rate)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite epsilon is ``None``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"updates_per_epoch": self.updates_per_epoch, "mechanism": self.mechanism.to_dict()}
        return {name: None if value == math.inf else value for name, value in values.items()}

    def __str__(self) -> str:
        """The guarantee, then the settings; each number is rounded to the side on which it still holds."""
        guarantee = (
            f"epsilon = {format_epsilon(self.epsilon, decimals=6)} at delta = {_up(self.delta)}"
            f" ({self.adjacency}, {self.num_updates:,} updates)"
        )
        rows = [
            (name.replace("_", " ").removeprefix("num "), text, "  <- solved for" if name == self.solved_for else "")
            for name, text in self._rows().items()
        ]
        solved = "  <- delta solved for" if self.solved_for == "delta" else ""
        return "\n".join([guarantee + solved, *(f"  {name:<18}{text}{mark}" for name, text, mark in rows)])

    def _rows(self) -> dict[str, str]:
        records = f" of {self.num_records:,} records" if self.num_records is not None else ""
        batch = f" (batches of {self.batch_size:,}{records})" if self.batch_size is not None else ""
        rows = {
            "noise_multiplier": _up(self.noise_multiplier),
            "sampling_rate": _down(self.sampling_rate) + batch,
            "num_updates": f"{self.num_updates:,} ({self.epochs:.6g} epochs of {self.updates_per_epoch:,})",
        }
        if self.spent_epsilon > 0:
            rows["spent_before"] = f"epsilon = {format_epsilon(self.spent_epsilon, decimals=6)}"
        return rows


def updates_per_epoch(sampling_rate: float) -> int:
    """Updates in which each record is expected once, rounded up to a whole number, as the training loop counts."""
    return max(1, math.ceil(1 / sampling_rate - _WHOLE))


def calculate_privacy(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    sampling_rate: float | None = None,
    batch_size: int | None = None,
    num_records: int | None = None,
    num_updates: int | None = None,
    epochs: float | None = None,
    spent: Mechanism | Ledger | None = None,
    adjacency: Adjacency | None = None,
) -> PrivacySettings:
    """Solves for the one of epsilon, delta, noise, sampling rate and updates that is left out.

    Each answer is on the safe side. Noise and rates end within 0.01 % below the target epsilon; a batch size or a
    number of updates is the largest that fits.

    Args:
        epsilon: Of the whole, with what was spent; greater than 0, or at least 0 if delta is left out.
        delta: In (0, 1), and below one over the number of records where that is known.
        noise_multiplier: Standard deviation of the noise over the bound of one record's contribution.
        sampling_rate: Probability of each record to be in an update, in (0, 1].
        batch_size: Instead of the rate: the expected number of records in an update; needs ``num_records``.
        num_records: Records in the data set. If the rate is left out, it becomes a whole batch size over this number.
        num_updates: Noisy updates still to come.
        epochs: Instead of the updates: passes over the data, each of one over the sampling rate updates, rounded up.
        spent: What was released about the same records before: a mechanism, or a ledger, whose adjacency and unit are
            kept.
        adjacency: Which data sets are neighbours; that of the ledger, or ``"add_remove"``, if ``None``.

    Returns:
        All settings, and what they cost.

    Raises:
        InvalidValueError: A value is out of range, or not exactly one setting is left out.
        CalibrationError: No value of the setting reaches the target; the message gives the reachable range.
        IncomparableError: The ledger is for another adjacency.
        LedgerError: Mechanisms in the ledger were chosen from outputs, so that no fixed plan continues it.

    Example:
        >>> settings = calculate_privacy(epsilon=3, delta=1e-5, batch_size=600, num_records=60_000, epochs=10)
        >>> print(settings)
        epsilon = 2.999977 at delta = 1e-05 (add_remove, 1,000 updates)
          noise multiplier  0.813587  <- solved for
          sampling rate     0.01 (batches of 600 of 60,000 records)
          updates           1,000 (10 epochs of 100)
    """
    known = _Known(
        epsilon=_validate.optional(_validate.non_negative, "epsilon", epsilon),
        delta=None if delta is None else _validate.delta(delta),
        noise_multiplier=_validate.optional(_validate.non_negative, "noise_multiplier", noise_multiplier),
        sampling_rate=_validate.optional(_validate.probability, "sampling_rate", sampling_rate),
        batch_size=_validate.optional(_validate.integer, "batch_size", batch_size, minimum=1),
        num_records=_validate.optional(_validate.integer, "num_records", num_records, minimum=1),
        num_updates=_validate.optional(_validate.integer, "num_updates", num_updates, minimum=0),
        epochs=_validate.optional(_validate.positive, "epochs", epochs),
        spent=asked_spent(spent, adjacency),
    )
    known.refuse_contradictions()
    return _SOLVERS[known.left_out()](known)


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What was given, each value in its range."""

    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    sampling_rate: float | None
    batch_size: int | None
    num_records: int | None
    num_updates: int | None
    epochs: float | None
    spent: Spent

    def refuse_contradictions(self) -> None:
        """Refuses two values for one setting, and values that do not fit together."""
        for one, other in (("sampling_rate", "batch_size"), ("num_updates", "epochs")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise InvalidValueError(f"`{one}` and `{other}` say the same thing twice. Give one of them.")
        if self.batch_size is not None:
            if self.num_records is None:
                raise InvalidValueError(
                    "`batch_size` says how likely a record is drawn only together with `num_records`. Give both, or"
                    " `sampling_rate`."
                )
            if self.batch_size > self.num_records:
                raise InvalidValueError(
                    f"`batch_size={self.batch_size}` must be at most `num_records={self.num_records}`."
                )
        if self.delta is not None and self.num_records is not None:
            _validate.delta_below_one_record(self.delta, self.num_records)

    def left_out(self) -> str:
        """The one setting that is not given."""
        given = {
            "epsilon": self.epsilon is not None,
            "delta": self.delta is not None,
            "noise_multiplier": self.noise_multiplier is not None,
            "sampling_rate": self.sampling_rate is not None or self.batch_size is not None,
            "num_updates": self.num_updates is not None or self.epochs is not None,
        }
        missing = [name for name, there in given.items() if not there]
        if len(missing) != 1:
            which = (
                "all of them are given" if not missing else f"missing are {', '.join(f'`{name}`' for name in missing)}"
            )
            raise InvalidValueError(
                "Leave out exactly one of `epsilon`, `delta`, `noise_multiplier`, `sampling_rate` (or `batch_size` with"
                f" `num_records`) and `num_updates` (or `epochs`), which is then solved for; {which}."
            )
        return missing[0]

    @property
    def rate(self) -> float:
        """The sampling rate that is given."""
        if self.batch_size is not None and self.num_records is not None:
            return self.batch_size / self.num_records
        return _given(self.sampling_rate)

    def updates(self, rate: float) -> int:
        """The number of updates that is given, at this rate if it is in epochs."""
        if self.num_updates is not None:
            return self.num_updates
        return max(1, math.ceil(_given(self.epochs) * updates_per_epoch(rate) - _WHOLE))

    def run(self) -> Mechanism:
        """The run, where all of it is given."""
        return self.updates(self.rate) * PoissonSampled(Gaussian(_given(self.noise_multiplier)), self.rate)

    def meter(self) -> Meter:
        """A meter for what is left of the budget."""
        epsilon = _validate.positive("epsilon", self.epsilon)
        return open_meter(Budget(epsilon, _given(self.delta), self.spent))

    def settings(
        self,
        solved_for: str,
        *,
        noise_multiplier: float | None = None,
        sampling_rate: float | None = None,
        batch_size: int | None = None,
        num_updates: int | None = None,
        delta: float | None = None,
    ) -> PrivacySettings:
        """What was given with the solution filled in; the cost is read again."""
        sigma = _given(self.noise_multiplier if noise_multiplier is None else noise_multiplier)
        rate = self.rate if sampling_rate is None else sampling_rate
        updates = self.updates(rate) if num_updates is None else num_updates
        run = updates * PoissonSampled(Gaussian(sigma), rate)
        at = _given(self.delta if delta is None else delta)
        return PrivacySettings(
            # A delta that was read at an epsilon is a guarantee at that epsilon.
            epsilon=self.spent.epsilon(run, at) if delta is None else _given(self.epsilon),
            delta=at,
            noise_multiplier=sigma,
            sampling_rate=rate,
            num_updates=updates,
            epochs=updates / updates_per_epoch(rate),
            batch_size=self.batch_size if batch_size is None else batch_size,
            num_records=self.num_records,
            adjacency=self.spent.adjacency,
            solved_for=solved_for,
            spent_epsilon=self.spent.epsilon(Composition(), at) if self.spent.mechanism.phases and at > 0 else 0.0,
            mechanism=run,
        )


def _epsilon(known: _Known) -> PrivacySettings:
    return known.settings("epsilon")


def _delta(known: _Known) -> PrivacySettings:
    delta = known.spent.delta(known.run(), _given(known.epsilon))
    most = 1.0 if known.num_records is None else 1 / known.num_records
    if delta >= most:
        bound = "1" if known.num_records is None else f"1/N = 1/{known.num_records}"
        raise CalibrationError(
            f"At `epsilon={known.epsilon:g}` the smallest delta is {delta:.6g}, which is not below {bound} and promises"
            " nothing to a single record. Choose a larger `epsilon`, more noise, or fewer updates."
        )
    return known.settings("delta", delta=delta)


def _noise(known: _Known) -> PrivacySettings:
    updates = known.updates(known.rate)
    _validate.integer("num_updates", updates, 1)
    return known.settings("noise_multiplier", noise_multiplier=solve_noise(known.meter(), known.rate, updates))


def _updates(known: _Known) -> PrivacySettings:
    meter = known.meter()
    update = PoissonSampled(Gaussian(_given(known.noise_multiplier)), known.rate)
    found = search_updates(meter, update, MOST_UPDATES)
    searched = f"with 1 to {MOST_UPDATES:,} updates"
    return known.settings(
        "num_updates", num_updates=int(reached(meter.budget, found, searched, "sampling rate or noise"))
    )


def _rate(known: _Known) -> PrivacySettings:
    """At a fixed number of epochs: first the number of updates an epoch, then the largest rate that gives it."""
    meter, sigma, records = known.meter(), _given(known.noise_multiplier), known.num_records
    if known.num_updates is not None:
        _validate.integer("num_updates", known.num_updates, 1)
        split = 1
    else:
        split = _fewest_updates_an_epoch(meter, known, sigma)
    updates = known.updates(1 / split)
    if records is None:
        least, most = (LEAST_RATE, 1.0) if split == 1 else (1 / split, 1 / (split - 1 + 2 * _WHOLE))
        found = search_rate(meter, sigma, updates, least=least, most=most)
    else:
        found = search_batch(meter, sigma, updates, records, records if split == 1 else (records - 1) // (split - 1))
    if found.fits is None or split == 1:
        reached(meter.budget, found, _searched(records), "updates or noise")
    value = _given(found.fits).value
    if records is None:
        return known.settings("sampling_rate", sampling_rate=value)
    return known.settings("sampling_rate", sampling_rate=value / records, batch_size=int(value))


def _searched(records: int | None) -> str:
    if records is None:
        return f"with sampling rates from {LEAST_RATE:g} to 1"
    return f"with batches of 1 to {records:,} records"


def _fewest_updates_an_epoch(meter: Meter, known: _Known, sigma: float) -> int:
    """The smallest number of updates an epoch that fits, at the smallest sampling rate with so many.

    At a fixed number of epochs, smaller batches cost less in the limit of many: ``mu**2`` is the number of epochs times
    the rate, times a function of the noise. Batches of nearly everything can cost less again, since a record then is in
    no more updates than there are epochs. Then the answer is one that fits while the next larger rate does not.

    Raises:
        CalibrationError: None fits, or batches of everything do.
    """
    update, records = Gaussian(sigma), known.num_records

    def rate(split: float) -> float:
        return 1 / split if records is None else math.ceil(records / split) / records

    most = round(1 / LEAST_RATE) if records is None else records
    knob = Knob(
        run=lambda split: known.updates(rate(split)) * PoissonSampled(update, rate(split)),
        place=lambda split: -math.log(split) / 2,
        value=lambda place: min(max(math.ceil(math.exp(-2 * place)), 1), most),
        cheapest=most,
        dearest=1,
        whole=True,
    )
    found = search(meter, knob, min(100, most))
    if found.exceeds is None and found.fits is not None and found.fits.epsilon < CLOSE * meter.budget.epsilon:
        raise CalibrationError(
            f"`epsilon={meter.budget.epsilon:g}` at `delta={meter.budget.delta:g}` is more than the run needs: with"
            f" every record in every update it has epsilon {found.fits.epsilon:.6g}. Choose a target below"
            f" {found.fits.epsilon:.6g}, or more epochs or less noise."
        )
    return updates_per_epoch(rate(reached(meter.budget, found, _searched(records), "epochs or noise")))


def _given(value: _T | None) -> _T:
    """A value of which :meth:`_Known.left_out` has made sure that it is there."""
    return cast(_T, value)


def _up(value: float) -> str:
    return _rounded(value, math.ceil)


def _down(value: float) -> str:
    return _rounded(value, math.floor)


def _rounded(value: float, towards: Callable[[float], int]) -> str:
    """Six significant digits."""
    text = f"{value:.6g}"
    if value <= 0 or not math.isfinite(value) or math.isclose(float(text), value, rel_tol=1e-12):
        return text
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return f"{towards(value / unit) * unit:.6g}"


_SOLVERS: dict[str, Callable[[_Known], PrivacySettings]] = {
    "epsilon": _epsilon,
    "delta": _delta,
    "noise_multiplier": _noise,
    "sampling_rate": _rate,
    "num_updates": _updates,
}
