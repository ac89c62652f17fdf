import math

import numpy as np
import pytest

from lightning_dp.accounting.mechanisms import Composition, Gaussian, PoissonSampled
from lightning_dp.errors import IncomparableError, InvalidValueError

RANDOM = np.random.default_rng(0)


def mixture(x, q, means, sigma):
    """Density of ``(1 - q) N(0, sigma^2 I) + q N(mean, sigma^2 I)`` at points ``(..., dimensions)``."""
    densities = [np.exp(-((x - mean) ** 2).sum(axis=-1) / (2 * sigma**2)) for mean in (np.zeros(x.shape[-1]), means)]
    return ((1 - q) * densities[0] + q * densities[1]) / (2 * math.pi * sigma**2) ** (x.shape[-1] / 2)


def replaced_delta(q, sigma, one, other, epsilon, points=401):
    """Delta of one step in which a record with contribution ``one`` becomes ``other``, by summing over a grid."""
    axis = np.linspace(-1 - 8 * sigma, 1 + 8 * sigma, points)
    x = np.stack(np.meshgrid(*[axis] * len(one), indexing="ij"), axis=-1)
    p, r = mixture(x, q, one, sigma), mixture(x, q, other, sigma)
    return float(np.maximum(p - math.exp(epsilon) * r, 0).sum() * (axis[1] - axis[0]) ** len(one))


def two_steps_delta(q, sigma, epsilon, points=3001):
    """Delta of two steps in which a record moves from 1 to -1, by summing over a grid of both outputs."""
    x = np.linspace(-1 - 9 * sigma, 1 + 9 * sigma, points)
    step = x[1] - x[0]
    p, r = (mixture(x[:, None], q, np.array([mean]), sigma) * step for mean in (1.0, -1.0))
    return float(np.maximum(np.outer(p, p) - math.exp(epsilon) * np.outer(r, r), 0).sum())


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 0.7), (0.3, 1.0), (0.9, 3.0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 2.0])
def test_replacing_in_one_step_matches_direct_summation(q, sigma, epsilon):
    expected = replaced_delta(q, sigma, np.array([1.0]), np.array([-1.0]), epsilon, points=400_001)
    value = PoissonSampled(Gaussian(sigma), q).delta(epsilon, adjacency="replace_one")
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-13)


@pytest.mark.parametrize(("q", "sigma"), [(0.03, 0.8), (0.7, 2.0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_replacing_in_two_steps_matches_direct_summation(q, sigma, epsilon):
    value = (2 * PoissonSampled(Gaussian(sigma), q)).delta(epsilon, adjacency="replace_one")
    assert value == pytest.approx(two_steps_delta(q, sigma, epsilon), rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("q", [0.02, 0.4, 1.0])
@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_opposite_unit_vectors_are_the_worst_replacement(q, sigma):
    mechanism = PoissonSampled(Gaussian(sigma), q)
    for _ in range(12):
        angles, norms = RANDOM.uniform(0, 2 * math.pi, 2), RANDOM.choice([0.0, 0.5, 0.9, 1.0], 2)
        one, other = (norm * np.array([math.cos(a), math.sin(a)]) for norm, a in zip(norms, angles, strict=True))
        for epsilon in (0.0, 0.2, 1.0):
            bound = mechanism.delta(epsilon, adjacency="replace_one")
            assert replaced_delta(q, sigma, one, other, epsilon) <= bound * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("count", [1, 40, 3000])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_a_replacement_costs_at_most_a_removal_and_an_addition(count, delta):
    run = count * PoissonSampled(Gaussian(1.2), 0.01)
    replaced = run.epsilon(delta, adjacency="replace_one")
    assert run.epsilon(delta) <= replaced
    # Removing, then adding: (eps, d) twice is (2 eps, (1 + e^eps) d).
    for half in np.linspace(0.01, 0.9, 12) * replaced:
        assert replaced <= 2 * half or run.delta(float(half)) * (1 + math.exp(half)) >= delta * (1 - 1e-9)


def test_replacing_without_sampling_is_a_gaussian_of_twice_the_distance():
    assert (5 * Gaussian(3.0)).epsilon(1e-6, adjacency="replace_one") == pytest.approx(
        (5 * Gaussian(1.5)).epsilon(1e-6)
    )


def test_a_null_record_adds_nothing_so_zeroing_it_out_costs_the_same_as_removing_it():
    run = 300 * PoissonSampled(Gaussian(1.0), 0.02)
    assert run.epsilon(1e-5, adjacency="zero_out") == run.epsilon(1e-5)


@pytest.mark.parametrize("count", [1, 500])
def test_a_group_of_one_is_a_record(count):
    run = count * PoissonSampled(Gaussian(1.0), 0.02) + Gaussian(5.0)
    assert run.group(1).epsilon(1e-5) == pytest.approx(run.epsilon(1e-5), rel=1e-12)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.5])
def test_a_group_costs_at_least_what_its_members_give_together(size, epsilon):
    q, sigma = 0.1, 1.5
    x = np.linspace(-12, 12 + size, 200_001)
    without = np.exp(-(x**2) / (2 * sigma**2))
    counts = range(size + 1)
    weights = [math.comb(size, k) * q**k * (1 - q) ** (size - k) for k in counts]
    group = sum(w * np.exp(-((x - k) ** 2) / (2 * sigma**2)) for w, k in zip(weights, counts, strict=True))
    scale = (x[1] - x[0]) / math.sqrt(2 * math.pi) / sigma
    truth = scale * max(
        np.maximum(group - math.exp(epsilon) * without, 0).sum(),
        np.maximum(without - math.exp(epsilon) * group, 0).sum(),
    )
    assert PoissonSampled(Gaussian(sigma), q).group(size).delta(epsilon) >= truth * (1 - 1e-9)


def test_profiles_of_one_adjacency_compose():
    one, other = 100 * PoissonSampled(Gaussian(1.0), 0.01), 50 * PoissonSampled(Gaussian(2.0), 0.02) + Gaussian(9.0)
    for adjacency in ("add_remove", "replace_one"):
        together = one.profile(adjacency) + other.profile(adjacency)
        assert together.epsilon(1e-5) == (one + other).epsilon(1e-5, adjacency=adjacency)
    assert (one.profile() + one.profile()).epsilon(1e-5) == (2 * one).epsilon(1e-5)


def test_profiles_of_different_adjacency_do_not_compose():
    one = Composition(((Gaussian(2.0), 3),))
    with pytest.raises(IncomparableError, match="add_remove and replace_one"):
        one.profile("add_remove") + one.profile("replace_one")


def test_an_unknown_adjacency_is_refused():
    with pytest.raises(InvalidValueError, match="`adjacency` must be one of add_remove, replace_one, zero_out"):
        Gaussian(1.0).epsilon(1e-5, adjacency="bounded")
