import math
import time
from random import Random

import numpy as np
import pytest

from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Composition, Gaussian, Laplace, PoissonSampled
from lightning_dp.accounting.profile import bounds, contour, running
from lightning_dp.accounting.profile.closed_form import gaussian_epsilon
from lightning_dp.accounting.profile.cumulants import ladder_for_delta
from lightning_dp.accounting.profile.track import HORIZON, Kinds, Track

SCHEDULE = [PoissonSampled(Gaussian(2 * 0.4 ** (k / 99)), 0.01) for k in range(100)]
HISTORIES = {
    "one phase": [(PoissonSampled(Gaussian(1.0), 0.01), 1000)],
    "small batches": [(PoissonSampled(Gaussian(1.1), 256 / 60_000), 14_062)],
    "large batches": [(PoissonSampled(Gaussian(5.0), 0.5), 200)],
    "plain and sampled": [(Gaussian(6.0), 2), (PoissonSampled(Gaussian(0.9), 0.02), 300)],
    "with a small release": [(Laplace(10.0), 3), (PoissonSampled(Gaussian(1.0), 0.01), 1000)],
    "100 phases": [(step, 20) for step in SCHEDULE],
}


def ledger_of(history):
    ledger = Ledger()
    for mechanism, count in history:
        ledger.record(mechanism, count=count)
    return ledger


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("delta", [1e-5, 1e-10])
def test_a_growing_ledger_reads_what_the_whole_composition_costs(history, delta):
    ledger = ledger_of(history)
    for _ in range(3):
        ledger.record(history[-1][0], count=7)
        assert ledger.epsilon(delta) == pytest.approx(ledger.composition().epsilon(delta), rel=1e-7)


@pytest.mark.parametrize("count", [1, 2, 10, 100, 1000])
def test_early_updates_read_what_the_whole_composition_costs(count):
    update, ledger = PoissonSampled(Gaussian(1.0), 0.01), Ledger()
    for done in range(1, 4):
        ledger.record(update, count=count)
        assert ledger.epsilon(1e-5) == pytest.approx((done * count * update).epsilon(1e-5), rel=1e-6)


def test_two_deltas_and_a_new_mechanism_do_not_disturb_each_other():
    ledger = ledger_of(HISTORIES["one phase"])
    for addition in (PoissonSampled(Gaussian(1.0), 0.01), Gaussian(4.0), Laplace(5.0)):
        ledger.record(addition)
        for delta in (1e-5, 1e-7, 1e-5):
            assert ledger.epsilon(delta) == pytest.approx(ledger.composition().epsilon(delta), rel=1e-7)


def test_a_reading_repeats_and_never_falls_as_updates_are_added():
    ledger, last = ledger_of(HISTORIES["one phase"]), 0.0
    for _ in range(200):
        ledger.record(HISTORIES["one phase"][0][0])
        value = ledger.epsilon(1e-5)
        assert value == ledger.epsilon(1e-5) >= last
        last = value


@pytest.mark.parametrize("name", ["one phase", "small batches", "large batches", "100 phases"])
def test_an_update_and_a_reading_are_far_cheaper_than_a_composition(name):
    ledger = ledger_of(HISTORIES[name])
    ledger.epsilon(1e-5)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        ledger.record(HISTORIES[name][-1][0])
        ledger.epsilon(1e-5)
        times.append(time.perf_counter() - start)
    assert sorted(times)[25] < 2e-3  # 0.1 ms on a quiet machine


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("name", HISTORIES)
def test_readings_stay_in_the_certified_interval_in_whatever_order_updates_come(name, adjacency):
    random, history = Random(name + adjacency), HISTORIES[name]
    ledger = Ledger(adjacency=adjacency)
    for mechanism, count in history:
        ledger.record(mechanism, count=count)
    ledger.epsilon(1e-6)
    for number in range(150):
        ledger.record(random.choice(history)[0], count=random.choice([1, 1, 1, 3, 70]))
        value = ledger.epsilon(1e-6)
        if number % 50 == 49:
            interval = ledger.composition().profile(adjacency).epsilon_interval(1e-6)
            assert interval.lower <= value
            assert value == pytest.approx(interval.upper, rel=1e-8)


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("name", ["one phase", "large batches", "plain and sampled", "with a small release"])
def test_a_followed_line_is_the_one_that_is_computed_anew(name, direction):
    history = HISTORIES[name]
    counts = np.array([count for _, count in history], dtype=np.float64)
    composed = Composition(history).profile().directions[direction]
    kinds, start = kinds_of([mechanism for mechanism, _ in history], composed, 1e-5)
    found = Track.around(kinds, counts, 1e-5, start * 1.001)
    assert found is not None
    track, value = found
    assert value == pytest.approx(start, rel=1e-10)
    followed = 0
    while followed < HORIZON:
        assert track.follow(len(history) - 1, 1)
        counts[-1] += 1
        value = track.epsilon()
        if value is None:
            break
        followed += 1
        anew = Track.around(kinds, counts, 1e-5, value)
        assert anew is not None
        assert value == pytest.approx(anew[1], rel=1e-10)
        exact = bounds.epsilon((composed_with(history, counts, direction),), 1e-5)
        assert exact.lower <= value
        assert value == pytest.approx(exact.upper, rel=1e-8)
    assert followed > 5
    assert value is None or not track.follow(0, 1)


def kinds_of(mechanisms, composed, delta):
    parts = composed.parts()
    start = bounds.epsilon((composed,), delta).upper
    sheet = contour.sheet(parts, ladder_for_delta(parts, math.log(delta)), start, math.log(delta), 4_000_000)
    plain = [
        (row, 0.5 / mechanism.noise_multiplier**2) for row, mechanism in enumerate(mechanisms) if is_plain(mechanism)
    ]
    sampled = [row for row, mechanism in enumerate(mechanisms) if isinstance(mechanism, PoissonSampled)]
    atomic = [row for row, mechanism in enumerate(mechanisms) if isinstance(mechanism, Laplace)]
    return Kinds(sheet, sampled + atomic, plain), start


def is_plain(mechanism):
    return isinstance(mechanism, Gaussian)


def composed_with(history, counts, direction):
    pairs = tuple((mechanism, int(count)) for (mechanism, _), count in zip(history, counts, strict=True))
    return Composition(pairs).profile().directions[direction]


def test_both_directions_of_plain_noise_are_read_once(monkeypatch):
    calls = []
    monkeypatch.setattr(running, "gaussian_epsilon", lambda mu, delta: calls.append(mu) or gaussian_epsilon(mu, delta))
    ledger = ledger_of([(Gaussian(20.0), 100)])
    assert ledger.epsilon(1e-5) == Composition(((Gaussian(20.0), 100),)).epsilon(1e-5)
    assert len(calls) == 1


def test_a_missing_noise_and_an_empty_ledger_are_read_too():
    ledger = Ledger()
    assert ledger.epsilon(1e-5) == 0
    ledger.record(PoissonSampled(Gaussian(0.0), 0.1))
    assert ledger.epsilon(1e-5) == math.inf
    assert Composition(((Gaussian(0.0), 1),)).epsilon(1e-5) == math.inf
