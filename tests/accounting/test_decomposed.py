"""Rare losses far larger than epsilon: accurate, fast, monotone, and true beside a direct sum."""

import math
import time

import numpy as np
import pytest
from scipy.special import ndtr

from lightning_dp.accounting.mechanisms import Composition, Gaussian, PoissonSampled
from lightning_dp.accounting.profile import clear_caches
from lightning_dp.accounting.profile.contour import sheet
from lightning_dp.accounting.profile.cumulants import Parts, ladder_for_epsilon
from lightning_dp.accounting.profile.decomposed import (
    _with_hits,
    _with_hits_and_bulk,
    _without_large,
    count_large,
    decompose,
)
from lightning_dp.accounting.profile.losses import SampledGaussianLoss
from lightning_dp.accounting.profile.sampled_gaussian import Step

WIDTH = 1e-3  # relative; most are far narrower
HARD = [
    ([(2.1e-6, 0.121, 146288), (1.4e-7, 0.186, 532)], 2.2e-4),
    ([(1.94e-6, 0.544, 182)], 2.6e-7),
    ([(6.5e-5, 35.7, 1536), (2e-7, 0.119, 6)], 2e-5),
    ([(4.7e-6, 4.45, 22), (3.3e-5, 0.766, 14), (1e-6, 12.8, 369)], 1.4e-8),
    (
        [
            (9.98568361526649e-06, 1.7658494891992933, 20118),
            (0.0022175272311230248, 26.588899408249624, 2439),
            (9.581452207603205e-06, 1.0740430981441926, 18),
            (8.434460008798015e-07, 28.62090113124578, 1250040),
            (0.0001727618381682981, 5.782638373483496, 1582),
        ],
        2.4129945253018815e-13,
    ),
    (
        [
            (0.02587837611654708, 134.3402948547508, 128),
            (2.318280930778658e-06, 2.103348519813453, 7870946),
            (1.2887487797592627e-07, 0.616096032913598, 1341),
            (0.0016825239014706247, 11.20547387024259, 30199),
            (2.8869322226024316e-05, 6.707133630765237, 47),
        ],
        2.2686087213198678e-13,
    ),
    ([(3.6274174615031506e-07, 0.7891705514146397, 10826)], 2.1674940926248745e-14),
    ([(0.00018261341919949113, 0.20136706402684104, 26440)], 1.4467941467809316e-15),
    ([(1.0859021083662535e-06, 0.10561519705270413, 114436)], 3.548534358361877e-14),
    ([(0.00029084796955469483, 1.9301503238403546, 106)], 1.3173906989579232e-14),
    ([(3.7626456299658094e-06, 65.85559934261555, 3)], 1.9465502469315263e-15),
    ([(1e-07, 8.6513227357182, 52369), (2.862584121700559e-07, 0.8529729302666819, 2319869)], 9.959728275129818e-15),
    (
        [
            (2.4797083592612245e-07, 0.12599233851047362, 5),
            (0.024153415321198857, 7.747182085632199, 2),
            (0.021693140307628332, 0.2613043355900604, 1),
        ],
        2.2436549866722826e-05,
    ),
    ([(1e-07, 173.13195253752457, 2533525), (1.6340880398484838e-06, 0.7898944740286036, 650081)], 8.955093335928e-14),
    (
        [
            (0.04074868242810423, 0.11364422504502435, 29),
            (1e-07, 63.49235477884799, 9844216),
            (1.56379603040215e-07, 1.5749733317076562, 438783),
        ],
        1.3565092030534608e-15,
    ),
    (
        [
            (0.009072522505435839, 90.7060920150297, 13),
            (1e-07, 1.0855602136016886, 5885950),
            (1.1425599343335476e-06, 12.452880654486753, 393904),
        ],
        2.690778965363076e-13,
    ),
    (
        [
            (2.8833657941331316e-05, 1.2929308635192103, 75594),
            (0.002561361949127354, 2.0523289902330886, 720),
            (1e-07, 66.48303321889719, 147123),
            (5.540623973123341e-06, 0.10608708272166222, 112780),
            (0.0001890263528532023, 3.6915312892482888, 3779),
        ],
        1.3524892171424271e-14,
    ),
]


def profile(phases):
    return Composition(tuple((PoissonSampled(Gaussian(sigma), q), n) for q, sigma, n in phases)).profile()


@pytest.mark.parametrize(("phases", "delta"), HARD, ids=lambda value: str(value)[:40])
def test_hard_settings_are_accurate_in_time_and_monotone(phases, delta):
    clear_caches()
    start = time.thread_time()
    lower, upper = profile(phases).epsilon_interval(delta)
    assert time.thread_time() - start < 3  # well below 1 s on a quiet machine
    assert upper * (1 - WIDTH) <= lower <= upper
    q, sigma, n = phases[0]
    assert profile([(q * 1.002, sigma, n), *phases[1:]]).epsilon(delta) >= upper * (1 - WIDTH)


@pytest.mark.parametrize(("phases", "delta"), HARD[1:6:2] + HARD[9:16:3], ids=lambda value: str(value)[:40])
def test_delta_inverts_epsilon_in_hard_settings(phases, delta):
    lower, upper = profile(phases).delta_interval(profile(phases).epsilon(delta))
    assert lower <= delta * (1 + 1e-9)
    assert delta * (1 - 1e-4) <= upper <= delta * (1 + 1e-4)


@pytest.mark.parametrize(
    ("phases", "delta"),
    [
        (
            [
                (0.000755723635393104, 0.1107992288112953, 1),
                (1.307324449645298e-05, 8.376710975634023, 45),
                (0.0002807869676156251, 71.08672434471316, 6694),
            ],
            0.0008134097481939537,
        ),
        ([(0.0015524910793024258, 0.44509725456237775, 3), (1e-07, 3.5877836229330433, 1704856)], 0.006655050664597373),
    ],
)
def test_epsilon_is_0_where_delta_is_enough(phases, delta):
    assert profile(phases).epsilon_interval(delta) == (0, 0)


def exact_delta(q, sigma, epsilon):
    """Delta of two equal steps that remove a record: the closed form of one, averaged over the output of the other."""
    x = np.linspace(-12, 14 + 1 / sigma, 400_001)
    loss = np.log1p(q * np.expm1(x / sigma - 1 / (2 * sigma**2)))
    density = ((1 - q) * np.exp(-(x**2) / 2) + q * np.exp(-((x - 1 / sigma) ** 2) / 2)) / math.sqrt(2 * math.pi)
    rest = epsilon - loss
    output = sigma * np.log(np.maximum(1 + np.expm1(rest) / q, 1e-300)) + 1 / (2 * sigma)
    # q (P - Q) + (1 - exp(rest)) Q above the output, without cancellation where the output is far out.
    inner = q * (ndtr(1 / sigma - output) - ndtr(-output)) - np.expm1(rest) * ndtr(-output)
    return float(np.maximum(inner, 0.0) @ density) * float(x[1] - x[0])


@pytest.mark.parametrize("option", [_without_large, _with_hits, _with_hits_and_bulk])
@pytest.mark.parametrize(
    ("q", "sigma", "epsilon"),
    [(1e-3, 0.5, 0.01), (1e-3, 0.5, 1.0), (0.01, 1.0, 0.02), (0.05, 2.0, 0.05), (1e-4, 0.3, 3.0), (0.1, 0.8, 0.5)],
)
def test_each_decomposition_contains_the_delta_of_two_steps(q, sigma, epsilon, option):
    truth = exact_delta(q, sigma, epsilon)
    parts = Parts((Step(SampledGaussianLoss(q, sigma, "remove")),), (2,), 0.0)
    found = option(parts, 0.8 * epsilon, 1.2 * epsilon, math.log(truth), 30_000_000)
    if found is not None:  # a bulk that is one sharp peak has no line
        assert found.lower(epsilon) * (1 - 1e-7) <= truth <= found.upper(epsilon) * (1 + 1e-7)
    best = decompose(parts, 0.8 * epsilon, 1.2 * epsilon, math.log(truth))
    assert best is not None
    assert best.lower(epsilon) == pytest.approx(best.upper(epsilon), rel=1e-6)
    assert best.upper(epsilon) == pytest.approx(truth, rel=1e-7)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 3.0, 30.0])
def test_large_losses_add_what_a_sum_says(epsilon):
    q, sigma, n = 1e-3, 0.3, 50
    parts = Parts((Step(SampledGaussianLoss(q, sigma, "remove")),), (n,), 0.0)
    large = count_large(parts, epsilon, math.log(1e-9), 1.0)
    (step,) = large.parts.parts
    x = np.linspace(-15, 15 + 1 / sigma, 200_001)
    marked = ndtr((x - step.cut) / step.edge)
    base = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    ratio = 1 + q * np.expm1(x / sigma - 1 / (2 * sigma**2))
    present, absent = float((base * ratio) @ marked), float(base @ marked)
    truth = -math.expm1(n * math.log1p(-present)) + math.exp(epsilon) * math.expm1(n * math.log1p(-absent))
    lower, upper = large.delta(epsilon)
    assert lower * (1 - 1e-8) <= max(truth, 0.0) <= upper * (1 + 1e-8)  # below 0 only where the doubt is as large
    assert upper - lower <= 1e-9 * abs(truth) + 1e-18


def test_tails_of_hits_are_below_their_bounds():
    parts = Parts((Step(SampledGaussianLoss(1e-4, 0.7, "remove")),), (100,), 0.0)
    parts = count_large(parts, 0.03, math.log(1e-9), 0.2).parts
    split, ladder = parts.with_steps(lambda step: step.split_at(0.005)), ladder_for_epsilon(parts, 0.02)
    few, many = (sheet(split, ladder, 0.02, math.log(delta), 10**8) for delta in (1e-9, 1e-14))
    assert few is not None
    assert many is not None
    sizes = np.log1p(np.abs(np.exp(many.logs[0]) * np.expm1(many.hits[0])))
    for edge, tail in zip(few.edges, few.tails[0], strict=True):
        assert (sizes[many.t >= edge] <= tail * (1 + 1e-9) + 1e-16).all()
