import math
import time

import pytest

from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.mechanisms import Composition, Gaussian, Laplace, PoissonSampled

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


def test_a_missing_noise_and_an_empty_ledger_are_read_too():
    ledger = Ledger()
    assert ledger.epsilon(1e-5) == 0
    ledger.record(PoissonSampled(Gaussian(0.0), 0.1))
    assert ledger.epsilon(1e-5) == math.inf
    assert Composition(((Gaussian(0.0), 1),)).epsilon(1e-5) == math.inf
