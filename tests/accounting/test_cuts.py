"""Where a cut is soft and a tilt is strong: nothing may be lost past the edge."""

import mpmath as mp
import numpy as np
import pytest

from lightning_dp.accounting.mechanisms import Gaussian, PoissonSampled
from lightning_dp.accounting.profile.losses import SampledGaussianLoss
from lightning_dp.accounting.profile.sampled_gaussian import Step
from lightning_dp.accounting.profile.tilted import tilted


def step(rate, sigma):
    return PoissonSampled(Gaussian(sigma), rate)


# A step of moderate loss, which has a closed form, and one with rare losses of the same size.
@pytest.mark.parametrize("sigma", [2.0, 2.26, 2.3, 2.5, 3.0])
def test_a_composition_costs_at_least_what_its_parts_cost(sigma):
    one, other = step(0.01, sigma), step(3e-6, 0.876)
    for adjacency in ("add_remove", "replace_one", "zero_out"):
        both = (one + other).profile(adjacency).epsilon_interval(1e-15)
        assert both.upper >= one.profile(adjacency).epsilon_interval(1e-15).lower


def test_random_compositions_cost_at_least_what_their_parts_cost():
    random = np.random.default_rng(11)
    for _ in range(6):
        one = step(10 ** random.uniform(-4, -1.5), 10 ** random.uniform(0, 0.6))
        other = step(10 ** random.uniform(-8, -5), 10 ** random.uniform(-0.3, 0.2))
        delta = 10 ** random.uniform(-15, -9)
        for adjacency in ("add_remove", "replace_one"):
            both = (one + other).profile(adjacency).epsilon_interval(delta)
            for part in (one, other):
                assert both.upper >= part.profile(adjacency).epsilon_interval(delta).lower


def exact_delta(one, other, epsilon):
    """Delta of two steps when removing a record: the integral over the output of one, in closed form for the other."""
    (q1, s1), (q2, s2), epsilon = tuple(map(mp.mpf, one)), tuple(map(mp.mpf, other)), mp.mpf(epsilon)

    def tail(x):
        return mp.erfc(x / mp.sqrt(2)) / 2

    def output(q, s, loss):
        return s * (mp.log((mp.exp(loss) - 1 + q) / q) + 1 / (2 * s * s))

    def rest(loss):
        if loss <= mp.log(1 - q2):
            return 1 - mp.exp(loss)
        x = output(q2, s2, loss)
        return (1 - q2) * tail(x) + q2 * tail(x - 1 / s2) - mp.exp(loss) * tail(x)

    def integrand(x):
        loss = mp.log(1 - q1 + q1 * mp.exp(x / s1 - 1 / (2 * s1 * s1)))
        return ((1 - q1) * mp.npdf(x) + q1 * mp.npdf(x - 1 / s1)) * rest(epsilon - loss)

    kink = output(q1, s1, epsilon - mp.log(1 - q2))
    near = [kink + d for d in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1)]
    return mp.quad(integrand, sorted([-16, -6, 0, 3, 6, 9, 16, 1 / s1, 1 / s1 + 8, 1 / s1 + 14, *near]))


@pytest.mark.parametrize(
    ("one", "other", "delta"),
    [
        ((1.1130617776225142e-3, 3.2222888395871543), (1.769762436505343e-8, 0.6571910326337049), 4.1758359872970e-15),
        ((3.6618725105031354e-4, 1.079165310001849), (4.608723906234944e-8, 0.8432307041307613), 1.535889063320e-12),
        ((6.204527366365587e-3, 3.9209344009634446), (4.43295348095397e-4, 1.5498236075408434), 1.77175169462776e-14),
        ((3.473298332472036e-4, 1.514568101493616), (5.84316750511724e-9, 1.0103422389502574), 1.5113750691627e-14),
        ((3.5918897091781256e-6, 0.6029875415839245), (5.134594111798717e-5, 1.830113529893639), 6.17453437782e-10),
    ],
)
def test_intervals_of_two_steps_contain_the_exact_value(one, other, delta):
    profile = (step(*one) + step(*other)).profile()
    removing = type(profile)(profile.directions[:1], profile.adjacency)
    lower, upper = removing.epsilon_interval(delta)
    with mp.workdps(30):
        assert exact_delta(one, other, upper) <= delta * (1 + 1e-12)
        assert exact_delta(one, other, lower) >= delta * (1 - 1e-12)


@pytest.mark.parametrize("direction", ["remove", "replace"])
@pytest.mark.parametrize("tilt", [1.0, 10.0, 50.0, 300.0])
def test_no_mass_is_left_at_the_ends_of_the_nodes(direction, tilt):
    """Or the tilt is refused, and a weaker one taken."""
    cut = Step(SampledGaussianLoss(3e-6, 0.876, direction), cut=10.0, edge=0.5)
    try:
        weights = np.abs(tilted(cut, tilt, 0.0).weights)
    except ArithmeticError:
        assert tilt > 10
    else:
        assert max(weights[0], weights[-1]) <= 1e-17 * weights.max()
