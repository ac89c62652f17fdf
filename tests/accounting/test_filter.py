"""The Renyi odometer and filter, against analysts that choose mechanisms and stopping times from what they saw.

Where an analyst is simulated, nothing is drawn: delta is computed, by dynamic programming over the privacy loss for the
best analyst of all, or by quadrature for a given one. What an analyst gains where it stops at the reading ``epsilon``
with loss L is ``1 - exp(epsilon - L)``, if positive; its mean under P must not exceed delta.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_dp import Gaussian, PoissonSampled, errors
from lightning_dp.accounting.filter import RenyiFilter
from lightning_dp.accounting.odometer import ORDERS, RenyiOdometer, renyi, to_epsilon

LOSSES = np.linspace(-8, 16, 1201)
STEP = LOSSES[1] - LOSSES[0]


def converted(rho: float, order: float, delta: float) -> float:
    """Canonne, Kamath and Steinke (2020), Proposition 12."""
    with mp.workdps(40):
        rho, order, delta = mp.mpf(rho), mp.mpf(order), mp.mpf(delta)
        return float(rho + mp.log((order - 1) / order) - (mp.log(delta) + mp.log(order)) / (order - 1))


def odometer_of(*steps: tuple[float, int], orders: tuple[float, ...] = ORDERS) -> RenyiOdometer:
    odometer = RenyiOdometer(orders=orders)
    for sigma, count in steps:
        odometer.add(Gaussian(sigma), count)
    return odometer


# --- the number itself


@pytest.mark.parametrize("order", [1.1, 2.0, 7.5, 64.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-10])
def test_with_one_order_the_reading_is_the_usual_conversion(order: float, delta: float) -> None:
    rho = order * 30 / (2 * 4.0**2)
    reading = odometer_of((4.0, 30), orders=(order,)).epsilon(delta)
    assert reading == pytest.approx(max(0.0, converted(rho, order, delta)), rel=1e-11)


@pytest.mark.parametrize("spent", [1e-4, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-15])
def test_the_reading_is_the_smallest_that_the_theorem_allows(spent: float, delta: float) -> None:
    rho = spent * np.array(ORDERS)
    reading = to_epsilon(rho, ORDERS, delta)

    def needed(loss: mp.mpf) -> mp.mpf:
        terms = [mp.exp(a * loss - (mp.mpf(a) - 1) * r) for a, r in zip(ORDERS, rho, strict=True)]
        return mp.exp(loss) - delta * mp.fsum(terms) / len(ORDERS)

    with mp.workdps(40):
        coarse = max((reading + mp.mpf(k) / 20 for k in range(-20, 61)), key=needed)
        fine = max((coarse + mp.mpf(k) / 2000 for k in range(-100, 101)), key=needed)
        largest = max(mp.mpf(0), mp.log(needed(fine)))
    assert largest <= reading
    assert reading == pytest.approx(float(largest), abs=1e-4)


@pytest.mark.parametrize("spent", [0.01, 1.0, 30.0])
def test_many_orders_are_no_worse_than_delta_split_among_them(spent: float) -> None:
    split = [converted(spent * a, a, 1e-5 / len(ORDERS)) for a in ORDERS]
    assert to_epsilon(spent * np.array(ORDERS), ORDERS, 1e-5) <= min(split)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-10])
def test_not_knowing_the_best_order_costs_little(sigma: float, delta: float) -> None:
    best = min(converted(a / (2 * sigma**2), a, delta) for a in 1 + np.geomspace(0.01, 1e4, 3000))
    assert odometer_of((sigma, 1)).epsilon(delta) <= 1.22 * best


def test_divergences_add_up_and_are_rounded_upwards() -> None:
    odometer = odometer_of((3.0, 7), (2.0, 1), (3.0, 5))
    exact = [mp.mpf(a) / 2 * (mp.mpf(12) / 9 + mp.mpf(1) / 4) for a in ORDERS]
    assert all(spent >= value for spent, value in zip(odometer.spent, exact, strict=True))
    assert odometer.spent == pytest.approx([float(value) for value in exact], rel=1e-14)


def test_a_composition_counts_like_its_parts() -> None:
    whole = RenyiOdometer()
    whole.add(3 * Gaussian(2.0) + Gaussian(5.0), count=2)
    assert whole.epsilon(1e-5) == pytest.approx(odometer_of((2.0, 6), (5.0, 2)).epsilon(1e-5), rel=1e-12)


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    odometer = RenyiOdometer()
    assert odometer.epsilon(1e-5) == 0
    odometer.add(Gaussian(0.0))
    assert math.isinf(odometer.epsilon(1e-5))


def test_replacing_a_record_and_owning_several_cost_more() -> None:
    plain, replaced, owned = RenyiOdometer(), RenyiOdometer(adjacency="replace_one"), RenyiOdometer(rows_per_unit=2)
    for odometer in (plain, replaced, owned):
        odometer.add(Gaussian(5.0))
    assert replaced.epsilon(1e-5) == pytest.approx(owned.epsilon(1e-5), rel=1e-12)
    assert plain.epsilon(1e-5) < owned.epsilon(1e-5)


# --- fixed schedules


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
def test_the_odometer_only_grows_and_is_never_below_the_exact_epsilon(delta: float) -> None:
    odometer, spent, before = RenyiOdometer(), 0 * Gaussian(1.0), 0.0
    for sigma in (9.0, 3.0, 20.0, 1.0, 50.0, 0.4, 7.0):
        odometer.add(Gaussian(sigma), 3)
        spent = spent + 3 * Gaussian(sigma)
        reading = odometer.epsilon(delta)
        assert reading >= max(before, spent.epsilon(delta))
        before = reading


@pytest.mark.parametrize("delta", [1e-3, 1e-8])
def test_the_odometer_is_never_below_the_exact_epsilon_of_sampled_steps(delta: float) -> None:
    odometer, spent = RenyiOdometer(), 0 * Gaussian(1.0)
    for sigma, rate, count in ((1.0, 0.01, 200), (0.6, 0.001, 50), (3.0, 0.3, 20), (0.8, 0.01, 1000)):
        step = PoissonSampled(Gaussian(sigma), rate)
        odometer.add(step, count)
        spent = spent + count * step
        assert spent.epsilon(delta) <= odometer.epsilon(delta) < math.inf


@pytest.mark.parametrize(("epsilon", "delta", "order"), [(1.0, 1e-5, 20.0), (4.0, 1e-6, 6.0), (0.5, 1e-3, 30.0)])
def test_with_one_order_the_filter_allows_what_the_renyi_bound_allows(
    epsilon: float, delta: float, order: float
) -> None:
    budget = RenyiFilter(epsilon=epsilon, delta=delta, orders=(order,))
    allowed = math.floor((epsilon - converted(0.0, order, delta)) / (order / (2 * 15.0**2)))
    assert budget.updates_left(Gaussian(15.0)) == allowed > 0
    budget.spend(Gaussian(15.0), count=allowed)
    assert budget.spent <= epsilon
    assert not budget.fits(Gaussian(15.0))


# --- what the filter does


def test_a_release_that_does_not_fit_is_refused_and_spends_nothing() -> None:
    budget = RenyiFilter(epsilon=1.0, delta=1e-5)
    budget.spend(Gaussian(10.0), count=3)
    spent = budget.spent
    with pytest.raises(errors.BudgetExceededError, match=r"Gaussian\(noise_multiplier=1.0\).*epsilon = 1 at"):
        budget.spend(Gaussian(1.0))
    with pytest.raises(errors.BudgetExceededError):
        budget.spend(Gaussian(0.0))
    assert budget.spent == spent == pytest.approx(1.0 - budget.remaining)
    assert budget.fits(Gaussian(0.0), count=0)


@pytest.mark.parametrize("limit", [0, 1, 5, 10**9])
def test_the_number_of_updates_that_fit_is_the_largest(limit: int) -> None:
    budget = RenyiFilter(epsilon=2.0, delta=1e-6)
    budget.spend(Gaussian(8.0))
    left = budget.updates_left(Gaussian(40.0), limit=limit)
    assert budget.fits(Gaussian(40.0), left)
    assert left == limit or not budget.fits(Gaussian(40.0), left + 1)


def test_a_budget_that_no_release_can_keep_is_refused_at_once() -> None:
    with pytest.raises(errors.InvalidValueError, match="Pass larger `orders`"):
        RenyiFilter(epsilon=1e-3, delta=1e-5)
    RenyiFilter(epsilon=1e-3, delta=1e-5, orders=(1e6,))


@pytest.mark.parametrize("orders", [(), (1.0,), (0.5, 2.0), (math.inf,), (math.nan,), ("2",)])
def test_bad_orders_are_refused(orders: tuple[float, ...]) -> None:
    with pytest.raises(errors.InvalidValueError, match="orders"):
        RenyiOdometer(orders=orders)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_bad_counts_are_refused(count: int) -> None:
    with pytest.raises(errors.InvalidValueError, match="count"):
        RenyiOdometer().add(Gaussian(1.0), count)
    with pytest.raises(errors.InvalidValueError, match="count"):
        RenyiFilter(epsilon=1.0, delta=1e-5).spend(Gaussian(1.0), count)


def test_divergences_are_those_of_the_worse_direction() -> None:
    step, orders = PoissonSampled(Gaussian(2.0), 0.2), (1.5, 4.0, 20.0)
    x = np.linspace(-35, 70, 400_001)
    without = norm.pdf(x, scale=2.0)
    present = 0.8 * without + 0.2 * norm.pdf(x, loc=1.0, scale=2.0)
    for order, value in zip(orders, renyi(3 * step, orders, "add_remove"), strict=True):
        ratio = np.log(present) - np.log(without)
        both = (np.trapezoid(without * np.exp(order * ratio), x), np.trapezoid(present * np.exp(-order * ratio), x))
        assert value == pytest.approx(3 * math.log(max(both)) / (order - 1), rel=1e-6)


# --- analysts


def transition(mu: float) -> tuple[np.ndarray, np.ndarray]:
    """Law of the loss after a Gaussian step, under P, from each loss of the grid; and what leaves it at the top."""
    inside = norm.pdf((LOSSES[None, :] - LOSSES[:, None] - mu * mu / 2) / mu) * STEP / mu
    return inside, norm.sf((LOSSES[-1] + STEP / 2 - LOSSES - mu * mu / 2) / mu)


def gained(epsilon: float) -> np.ndarray:
    return np.maximum(0.0, -np.expm1(epsilon - LOSSES))


def most_by_stopping(mu: float, readings: list[float]) -> float:
    """What an analyst gains that takes Gaussian steps and stops when it likes."""
    inside, above = transition(mu)
    value = gained(readings[-1])
    for epsilon in readings[-2::-1]:
        value = np.maximum(gained(epsilon), inside @ value + above)
    return float(np.interp(0.0, LOSSES, value))


@pytest.mark.parametrize(("mu", "rounds", "factor"), [(0.3, 40, 9), (0.5, 20, 7)])
def test_stopping_when_it_suits_breaks_exact_composition_but_not_the_odometer(
    mu: float, rounds: int, factor: float
) -> None:
    delta = 1e-5
    exact = [(n * Gaussian(1 / mu)).epsilon(delta) if n else 0.0 for n in range(rounds + 1)]
    assert most_by_stopping(mu, exact[:2]) == pytest.approx(delta, rel=0.02)  # nothing to stop: the grid is fine
    assert most_by_stopping(mu, exact) > factor * delta
    odometer = [odometer_of((1 / mu, n)).epsilon(delta) if n else 0.0 for n in range(rounds + 1)]
    assert most_by_stopping(mu, odometer) < delta


@pytest.mark.parametrize("orders", [ORDERS, (4.0,)], ids=["many orders", "one order"])
def test_no_analyst_with_two_mechanisms_gets_more_than_delta_past_the_filter(orders: tuple[float, ...]) -> None:
    epsilon, delta, small, large = 3.0, 0.01, 0.15, 0.5
    steps = [(mu, *transition(mu)) for mu in (small, large)]

    @functools.cache
    def allowed(counts: tuple[int, int]) -> bool:
        spent = counts[0] * Gaussian(1 / small) + counts[1] * Gaussian(1 / large)
        return RenyiFilter(epsilon=epsilon, delta=delta, orders=orders).fits(spent)

    @functools.cache
    def value(counts: tuple[int, int]) -> np.ndarray:
        best = gained(epsilon)
        for index, (_, inside, above) in enumerate(steps):
            following = (counts[0] + (index == 0), counts[1] + (index == 1))
            if allowed(following):
                best = np.maximum(best, inside @ value(following) + above)
        return best

    spent = float(np.interp(0.0, LOSSES, value((0, 0))))
    assert value.cache_info().currsize > 30
    assert delta / 50 < spent < delta


def gaussian_delta(mu: float, epsilon: np.ndarray) -> np.ndarray:
    """Hockey-stick divergence of ``N(mu, 1)`` from ``N(0, 1)``, for any real epsilon."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def sampled_delta(rate: float, mu: float, epsilon: np.ndarray) -> np.ndarray:
    """The same of ``(1 - rate) N(0, 1) + rate N(mu, 1)`` from ``N(0, 1)``."""
    inner = (np.exp(epsilon) - (1 - rate)) / rate
    sampled = rate * gaussian_delta(mu, np.log(np.maximum(inner, 1e-300)))
    return np.where(inner <= 0, -np.expm1(epsilon), sampled)


def test_choosing_the_second_mechanism_from_the_first_output_breaks_exact_composition() -> None:
    # A Gaussian step, then either a sampled one of little noise or a plain one of much: each way costs the same epsilon
    # at delta = 1e-6. The analyst takes whichever gains more after what it saw, and spends nearly twice delta.
    delta, first, rate, sampled_mu = 1e-6, 1.0, 0.01, 2.0
    z = np.linspace(-12, 12, 8001)
    loss = first * z - first**2 / 2
    weight = norm.pdf(z) * np.exp(loss) * (z[1] - z[0])

    def total(second: Callable[[np.ndarray], np.ndarray], epsilon: float) -> float:
        return float((weight * second(epsilon - loss)).sum())

    def by_sampled(e: np.ndarray) -> np.ndarray:
        return sampled_delta(rate, sampled_mu, e)

    epsilon = brentq(lambda e: total(by_sampled, e) - delta, 0.1, 50)
    plain_mu = brentq(lambda mu: total(lambda e: gaussian_delta(mu, e), epsilon) - delta, 1e-2, 20)
    ways = [PoissonSampled(Gaussian(1 / sampled_mu), rate), Gaussian(1 / plain_mu)]
    for way in ways:
        assert (Gaussian(1 / first) + way).epsilon(delta) == pytest.approx(epsilon, rel=1e-6)
    chosen = total(lambda e: np.maximum(by_sampled(e), gaussian_delta(plain_mu, e)), epsilon)
    assert chosen > 1.85 * delta

    readings = [odometer_of((1 / first, 1)).epsilon_after(way, 1, delta=delta) for way in ways]
    stays = np.maximum(by_sampled(readings[0] - loss), gaussian_delta(plain_mu, readings[1] - loss))
    assert float((weight * stays).sum()) < delta


def outcome_probability(order: float, rest: float, loss: float) -> float:
    """Probability under Q of an outcome of this loss, which alone has Renyi divergence ``rest / (order - 1)``."""

    def excess(log_q: float) -> float:
        q, p = math.exp(log_q), math.exp(log_q + loss)
        return float(np.logaddexp(log_q + order * loss, (1 - order) * math.log1p(-q) + order * math.log1p(-p))) - rest

    top = -loss - 1e-9
    return math.exp(top) if excess(top) <= 0 else math.exp(brentq(excess, -690.0, top, xtol=1e-12))


def gain_of_any_order_analyst(epsilon: float, delta: float, mu: float, z: float) -> float:
    """What the analyst of the next test gains if its first output is ``z``; it exhausts the order ``z / mu``."""
    order = z / mu
    log_c = (order - 1) * math.log(order - 1) - order * math.log(order) - (order - 1) * epsilon
    rest = math.log(delta) - log_c - order * (order - 1) * mu**2 / 2  # (order - 1) times what is left of the budget
    first = mu * z - mu**2 / 2
    second = epsilon + math.log(order / (order - 1)) - first
    if rest <= 0 or second <= 0:
        return 0.0
    q = outcome_probability(order, rest, second)
    return float(norm.pdf(z)) * q * (math.exp(first + second) - math.exp(epsilon))


def test_a_filter_that_goes_on_while_any_order_has_budget_left_would_spend_more_than_delta() -> None:
    # Under Q the first output is z ~ N(0, 1), with z ~ N(mu, 1) under P. The second mechanism has one outcome of
    # positive loss and uses up, of the order z / mu, exactly what alone it would be allowed.
    epsilon, delta, mu = 4.0, 1e-8, 0.2
    z = np.linspace(1.2 * mu, 10.0, 2001)
    gains = [gain_of_any_order_analyst(epsilon, delta, mu, float(value)) for value in z]
    assert np.trapezoid(gains, z) > 1.8 * delta
