"""Laplace, randomized response, exponential and bare guarantees, plain and sampled, against their outputs."""

from __future__ import annotations

import itertools
import json
import math
import warnings

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, LaplacePrivacyLoss
from numpy.typing import NDArray

from lightning_dp.accounting.adjacency import Adjacency, Direction
from lightning_dp.accounting.mechanisms import (
    ApproximateDP,
    Composition,
    ExponentialMechanism,
    Gaussian,
    Laplace,
    PoissonSampled,
    RandomizedResponse,
    SingleMechanism,
    mechanism_from_dict,
)
from lightning_dp.accounting.profile.atoms import AtomicPair, atomic_delta, connect_the_dots
from lightning_dp.accounting.profile.losses import AtomicLoss, GaussianLoss
from lightning_dp.errors import IncomparableError, InvalidValueError, LedgerError

Floats = NDArray[np.float64]

PAIRS: list[tuple[Adjacency, Direction]] = [
    ("add_remove", "remove"),
    ("add_remove", "add"),
    ("zero_out", "remove"),
    ("zero_out", "add"),
    ("replace_one", "replace"),
]
RATES = [1.0, 0.9, 0.3, 0.01]
EXAMPLES: list[SingleMechanism] = [
    Laplace(1.7),
    RandomizedResponse(1.2),
    RandomizedResponse(0.8, 5),
    ExponentialMechanism(1.5),
    ApproximateDP(0.7, 0.01),
]


def delta(mechanism: SingleMechanism, adjacency: Adjacency, direction: Direction, epsilon: Floats) -> Floats:
    loss = mechanism.loss(adjacency, direction)
    assert isinstance(loss, AtomicLoss)
    return atomic_delta(loss, epsilon)


def hockey_stick(p: Floats, q: Floats, epsilon: Floats) -> Floats:
    """Delta of two explicit distributions over the same outputs."""
    return np.array([np.maximum(p.ravel() - math.exp(e) * q.ravel(), 0).sum() for e in epsilon])


def sampled(inside: Floats, outside: Floats, rate: float) -> Floats:
    return rate * inside + (1 - rate) * outside


def epsilons(largest: float, count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).uniform(-1.1 * largest, 1.1 * largest, count)


def laplace_bins(location: float, scale: float, step: float = 1 / 64) -> Floats:
    """Probabilities of the cells of a grid on which whole, half and quarter locations lie."""
    edges = np.arange(-30.0, 30.0 + step, step)
    z = (edges - location) / scale
    below = np.where(z < 0, 0.5 * np.exp(np.minimum(z, 0)), 1 - 0.5 * np.exp(-np.maximum(z, 0)))
    return np.diff(np.concatenate([[0.0], below, [1.0]]))


def assert_bounds(bound: Floats, truth: Floats, slack: float = math.inf) -> None:
    assert (bound - truth).min() >= -1e-13
    assert (bound - truth).max() <= slack


# -- Laplace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-8, 0.01, 0.5, 1.0, 4.0, 15.0, 300.0])
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_laplace_has_its_closed_form_profile(epsilon: float, adjacency: Adjacency) -> None:
    total = 2 * epsilon if adjacency == "replace_one" else epsilon
    at, pair = epsilons(total, 1000), Laplace(1 / epsilon).pair(adjacency)
    inner = -np.expm1((np.clip(at, -total, total) - total) / 2)
    truth = np.where(at < -total, -np.expm1(at), inner)
    widest = np.diff(pair.losses).max()
    line_above_root = 1.1 * widest**2 / 32
    assert_bounds(pair.delta(at), truth, line_above_root + 1e-13 * epsilon)
    points = pair.losses[:-1]
    assert pair.delta(points) == pytest.approx(-np.expm1((points - total) / 2), rel=1e-11, abs=0)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_laplace_bounds_its_binned_outputs_closely(rate: float, direction: Direction) -> None:
    scale = 0.9
    with_it, without = sampled(laplace_bins(1, scale), laplace_bins(0, scale), rate), laplace_bins(0, scale)
    pair = (with_it, without) if direction == "remove" else (without, with_it)
    at = epsilons(1 / scale, 300)
    assert_bounds(
        delta(PoissonSampled(Laplace(scale), rate), "add_remove", direction, at), hockey_stick(*pair, at), 5e-5
    )


@pytest.mark.parametrize("rate", RATES)
def test_replaced_laplace_bounds_every_pair_of_values(rate: float) -> None:
    scale, at = 1.3, epsilons(2 / 1.3, 200)
    found = delta(PoissonSampled(Laplace(scale), rate), "replace_one", "replace", at)
    gaps = []
    for one, other in itertools.product([-1.0, -0.25, 0.0, 0.5, 1.0], repeat=2):
        outputs = [sampled(laplace_bins(x, scale), laplace_bins(0, scale), rate) for x in (one, other)]
        truth = hockey_stick(outputs[0], outputs[1], at)
        assert_bounds(found, truth)
        gaps.append((found - truth).max())
    assert min(gaps) < 1e-4  # opposite values are the worst


@pytest.mark.parametrize("rate", [1.0, 0.4])
@pytest.mark.parametrize(
    ("one", "other"),
    [((1, 0), (0, 0)), ((0.5, 0.5), (0, 0)), ((0.25, -0.75), (0, 0)), ((1, 0), (0, 1)), ((0.5, 0.5), (-0.5, -0.5))],
)
def test_laplace_bounds_moves_in_two_dimensions(rate: float, one: tuple[float, float], other: tuple[float, float]):
    scale, at = 0.8, epsilons(2 / 0.8, 100)

    def output(x: tuple[float, float]) -> Floats:
        cells = [np.add.reduceat(laplace_bins(v, scale), np.arange(1, 3841, 8)) for v in x]  # cells of an eighth
        return np.outer(*cells)

    p, q = (sampled(output(x), output((0, 0)), rate) for x in (one, other))
    mechanism = PoissonSampled(Laplace(scale), rate)
    if other == (0, 0):
        assert_bounds(delta(mechanism, "add_remove", "remove", at), hockey_stick(p, q, at))
        assert_bounds(delta(mechanism, "add_remove", "add", at), hockey_stick(q, p, at))
    assert_bounds(delta(mechanism, "replace_one", "replace", at), hockey_stick(p, q, at))
    assert_bounds(delta(mechanism, "replace_one", "replace", at), hockey_stick(q, p, at))


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
@pytest.mark.parametrize(("direction", "theirs"), [("remove", AdjacencyType.REMOVE), ("add", AdjacencyType.ADD)])
def test_laplace_agrees_with_dp_accounting(
    rate: float, scale: float, direction: Direction, theirs: AdjacencyType
) -> None:
    oracle = LaplacePrivacyLoss(scale, sampling_prob=rate, adjacency_type=theirs)
    at = np.random.default_rng(1).uniform(0, 1.05 / scale, 100)
    truth = np.array([oracle.get_delta_for_epsilon(float(e)) for e in at])
    assert_bounds(delta(PoissonSampled(Laplace(scale), rate), "add_remove", direction, at), truth, 2e-6)


def test_many_laplace_releases_agree_with_dp_accounting() -> None:
    theirs = privacy_loss_distribution.from_laplace_mechanism(10.0, value_discretization_interval=1e-4)
    expected = theirs.self_compose(100).get_epsilon_for_delta(1e-5)
    assert (100 * Laplace(10.0)).epsilon(1e-5) == pytest.approx(expected, rel=1e-5)


# -- randomized response -----------------------------------------------------------------------------------------------


def response(truth: int, epsilon: float, categories: int) -> Floats:
    weights = np.ones(categories)
    weights[truth] = math.exp(epsilon)
    return weights / weights.sum()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("categories", [2, 3, 7])
@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_randomized_response_is_the_enumeration_of_its_answers(rate: float, categories: int, epsilon: float) -> None:
    mechanism, at = PoissonSampled(RandomizedResponse(epsilon, categories), rate), epsilons(epsilon, 200)
    answers = [response(k, epsilon, categories) for k in range(categories)]
    inside = sampled(answers[1], answers[0], rate)
    for adjacency in ("add_remove", "zero_out"):
        assert_bounds(delta(mechanism, adjacency, "remove", at), hockey_stick(inside, answers[0], at), 1e-12)
        assert_bounds(delta(mechanism, adjacency, "add", at), hockey_stick(answers[0], inside, at), 1e-12)
    replaced = delta(mechanism, "replace_one", "replace", at)
    for one, other in itertools.product(range(min(categories, 3)), repeat=2):
        p, q = (sampled(answers[k], answers[0], rate) for k in (one, other))
        assert_bounds(replaced, hockey_stick(p, q, at), 1e-12 if rate == 1 and one != other else math.inf)


def test_randomized_response_has_two_or_three_losses() -> None:
    for categories, losses in ((2, [-1.5, 1.5]), (3, [-1.5, 0.0, 1.5]), (10**18, [-1.5, 0.0, 1.5])):
        loss = RandomizedResponse(1.5, categories).loss("replace_one", "replace")
        assert isinstance(loss, AtomicLoss)
        assert loss.losses.tolist() == losses
        assert loss.infinite == 0


def test_a_group_of_answers_is_their_composition() -> None:
    assert RandomizedResponse(0.5, 3).group(4) == 4 * RandomizedResponse(0.5, 3)
    assert RandomizedResponse(0.5, 3).group(1) == RandomizedResponse(0.5, 3)


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_sampled_group_of_answers_is_bounded(rate: float) -> None:
    epsilon, at = 0.6, epsilons(1.8, 200)
    mechanism = PoissonSampled(RandomizedResponse(epsilon), rate).group(3)
    truth, null = response(1, epsilon, 2), response(0, epsilon, 2)
    one_by_one = sampled(truth, null, rate)
    p = np.einsum("i,j,k->ijk", one_by_one, one_by_one, one_by_one)
    q = np.einsum("i,j,k->ijk", null, null, null)
    assert_bounds(delta(mechanism, "add_remove", "remove", at), hockey_stick(p, q, at))
    assert_bounds(delta(mechanism, "add_remove", "add", at), hockey_stick(q, p, at))


# -- exponential mechanism ---------------------------------------------------------------------------------------------


def choice(utility: Floats, epsilon: float) -> Floats:
    weights = np.exp(epsilon * utility / 2)
    return weights / weights.sum()


def bounded_range_delta(epsilon: float, t: float, at: Floats) -> Floats:
    """Two outputs, with losses ``t`` and ``t - epsilon``."""
    high = (math.exp(epsilon) - math.exp(t)) / math.expm1(epsilon)
    p = np.array([high, 1 - high])
    q = p * np.exp([-t, epsilon - t])
    assert q.sum() == pytest.approx(1)
    return hockey_stick(p, q, at)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 6.0])
def test_exponential_profile_is_the_largest_over_its_family(epsilon: float) -> None:
    at = epsilons(epsilon, 200)
    inner = np.clip(at, -epsilon, epsilon)
    closed = (math.exp(epsilon / 2) - np.exp(inner / 2)) ** 2 / math.expm1(epsilon)
    closed = np.where(at < -epsilon, -np.expm1(at), closed)
    for t in np.linspace(0, epsilon, 50):
        assert_bounds(closed, bounded_range_delta(epsilon, t, at))
    attained = [bounded_range_delta(epsilon, (epsilon + e) / 2, np.array([e]))[0] for e in inner]
    assert closed[abs(at) < epsilon] == pytest.approx(np.array(attained)[abs(at) < epsilon], rel=1e-9, abs=1e-14)
    assert_bounds(delta(ExponentialMechanism(epsilon), "add_remove", "remove", at), closed, 1e-6 * max(1.0, epsilon**2))


@pytest.mark.parametrize("epsilon", [0.4, 2.5])
@pytest.mark.parametrize("rate", RATES)
def test_exponential_bounds_random_utilities(epsilon: float, rate: float) -> None:
    random, at = np.random.default_rng(3), epsilons(2 * epsilon, 40)
    mechanism = PoissonSampled(ExponentialMechanism(epsilon), rate)
    found = {pair: delta(mechanism, *pair, at) for pair in PAIRS}
    for _ in range(200):
        size = int(random.integers(2, 6))
        base = random.normal(0, random.choice([0.1, 1.0, 5.0]), size)
        moves = random.choice([random.uniform(-1, 1, (2, size)), random.choice([-1.0, 1.0], (2, size))])
        absent = choice(base, epsilon)
        one, other = (sampled(choice(base + move, epsilon), absent, rate) for move in moves)
        for adjacency in ("add_remove", "zero_out"):
            assert_bounds(found[adjacency, "remove"], hockey_stick(one, absent, at))
            assert_bounds(found[adjacency, "add"], hockey_stick(absent, one, at))
        assert_bounds(found["replace_one", "replace"], hockey_stick(one, other, at))


# -- bare guarantees ---------------------------------------------------------------------------------------------------


def three_outputs(random: np.random.Generator) -> list[Floats]:
    """Outputs without the record and with two values of it; some are impossible."""
    size = int(random.integers(2, 6))
    masses = random.dirichlet(np.full(size, random.choice([0.3, 1.0, 10.0])), 3) * (random.random((3, size)) < 0.9)
    masses[:, 0] += 1 - masses.sum(axis=1)
    return list(masses)


def smallest_delta(epsilon: float, pairs: list[tuple[Floats, Floats]]) -> float:
    return max(hockey_stick(p, q, np.array([epsilon]))[0] for a, b in pairs for p, q in ((a, b), (b, a)))


@pytest.mark.parametrize("rate", RATES)
def test_bare_guarantee_stated_for_adding_bounds_every_adjacency(rate: float) -> None:
    random, at = np.random.default_rng(4), epsilons(3, 40)
    for _ in range(150):
        absent, one, other = three_outputs(random)
        epsilon = random.choice([0.0, random.uniform(0, 1.5)])
        stated = smallest_delta(epsilon, [(absent, one), (absent, other)])
        mechanism = PoissonSampled(ApproximateDP(epsilon, min(1.0, stated)), rate)
        p, q = sampled(one, absent, rate), sampled(other, absent, rate)
        truths = {
            "remove": hockey_stick(p, absent, at),
            "add": hockey_stick(absent, p, at),
            "replace": hockey_stick(p, q, at),
        }
        for (adjacency, direction), truth in itertools.product(PAIRS, truths.items()):
            if adjacency != "add_remove" or direction == truth[0]:  # another record may stand for none
                replaced = hockey_stick(p, q, at) if adjacency == "zero_out" else truth[1]
                loss = mechanism.loss(adjacency, direction)
                found = np.ones_like(at) if isinstance(loss, GaussianLoss) else atomic_delta(loss, at)
                assert_bounds(found, replaced)


@pytest.mark.parametrize("rate", RATES)
def test_bare_guarantee_stated_for_null_records_bounds_replacement(rate: float) -> None:
    random, at = np.random.default_rng(5), epsilons(3, 40)
    for _ in range(150):
        null, one, other = three_outputs(random)
        epsilon = random.uniform(0, 1.0)
        stated = min(1.0, smallest_delta(epsilon, [(null, one), (null, other)]))
        mechanism = PoissonSampled(ApproximateDP(epsilon, stated, "zero_out"), rate)
        p, q = sampled(one, null, rate), sampled(other, null, rate)
        for (adjacency, direction), truth in (
            (("zero_out", "remove"), hockey_stick(p, null, at)),
            (("zero_out", "add"), hockey_stick(null, p, at)),
            (("replace_one", "replace"), hockey_stick(p, q, at)),
        ):
            loss = mechanism.loss(adjacency, direction)  # type: ignore[arg-type]
            assert_bounds(np.ones_like(at) if isinstance(loss, GaussianLoss) else atomic_delta(loss, at), truth)


@pytest.mark.parametrize(("epsilon", "stated"), [(1.0, 0.0), (1.0, 1e-6), (0.0, 0.1), (5.0, 1e-30)])
def test_bare_guarantee_has_the_profile_of_its_worst_mechanism(epsilon: float, stated: float) -> None:
    at = np.linspace(0, 1.2 * epsilon + 0.1, 50)
    worst = (np.exp(epsilon) - np.exp(np.minimum(at, epsilon))) / (1 + math.exp(epsilon))
    truth = stated + (1 - stated) * worst
    found = delta(ApproximateDP(epsilon, stated), "add_remove", "remove", at)
    assert found == pytest.approx(truth, rel=1e-12, abs=0 if stated else 1e-15)
    assert found[-1] == pytest.approx(stated, rel=1e-12)


def test_bare_guarantees_convert_through_two_steps_only() -> None:
    two_steps = ApproximateDP(0.5, 1e-6).group(2)
    assert two_steps.stated_epsilon == 1.0
    assert two_steps.stated_delta == pytest.approx(1e-6 * (1 + math.exp(0.5)), rel=1e-12)
    at = np.linspace(0, 1.2, 50)
    for stated, asked in (("add_remove", "replace_one"), ("add_remove", "zero_out"), ("zero_out", "replace_one")):
        found = delta(ApproximateDP(0.5, 1e-6, stated), asked, "remove", at)
        assert found[-1] == pytest.approx(two_steps.stated_delta, rel=1e-10)
        bare = ApproximateDP(two_steps.stated_epsilon, two_steps.stated_delta, asked)
        assert (found <= delta(bare, asked, "remove", at) * (1 + 1e-12)).all()
    for stated, asked in (("replace_one", "add_remove"), ("replace_one", "zero_out"), ("zero_out", "add_remove")):
        with pytest.raises(IncomparableError, match=f"under '{stated}', which says nothing under '{asked}'.*Ask for"):
            ApproximateDP(0.5, 1e-6, stated).loss(asked, "remove")


def test_bare_guarantee_of_replacement_cannot_be_sampled() -> None:
    mechanism = PoissonSampled(ApproximateDP(0.5, 1e-6, "replace_one"), 0.1)
    for adjacency, direction in PAIRS:
        with pytest.raises(IncomparableError, match="cannot be sampled"):
            mechanism.loss(adjacency, direction)


@pytest.mark.parametrize(("epsilon", "stated"), [(0.7, 1e-6), (0.0, 1e-3), (1e-9, 1e-3), (300.0, 1e-300), (1.0, 0.0)])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_group_of_a_bare_guarantee_adds_its_steps(epsilon: float, stated: float, size: int) -> None:
    total, log_terms = 0.0, [i * epsilon for i in range(size)]
    if stated:
        total = min(1.0, math.exp(min(0.0, math.log(stated) + float(np.logaddexp.reduce(log_terms)))))
    group = ApproximateDP(epsilon, stated, "zero_out").group(size)
    assert (group.stated_epsilon, group.adjacency) == (size * epsilon, "zero_out")
    assert group.stated_delta == pytest.approx(total, rel=1e-6, abs=0)


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", EXAMPLES, ids=repr)
@pytest.mark.parametrize("rate", [0.7, 0.1, 1e-6])
def test_sampled_profile_follows_from_the_plain_one(mechanism: SingleMechanism, rate: float) -> None:
    at = epsilons(3 * rate, 300)
    inside = 1 + np.expm1(at) / rate
    expected = np.where(
        inside > 0, rate * delta(mechanism, "add_remove", "remove", np.log(np.maximum(inside, 1e-300))), -np.expm1(at)
    )
    sample = PoissonSampled(mechanism, rate)
    assert delta(sample, "add_remove", "remove", at) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    mirrored = 1 - np.exp(at) + np.exp(at) * delta(sample, "add_remove", "remove", -at)
    assert delta(sample, "add_remove", "add", at) == pytest.approx(mirrored, abs=2e-13)


@pytest.mark.parametrize("mechanism", EXAMPLES, ids=repr)
@pytest.mark.parametrize("rate", RATES[1:])
def test_replacing_costs_no_more_than_removing_and_adding(mechanism: SingleMechanism, rate: float) -> None:
    at, sample = np.linspace(0, 3, 100), PoissonSampled(mechanism, rate)
    replaced = delta(sample, "replace_one", "replace", at)
    assert (replaced <= delta(mechanism, "replace_one", "replace", at) + 1e-12).all()
    for share in (0.0, 0.3, 0.5, 0.7, 1.0):
        removed = delta(sample, "add_remove", "remove", share * at)
        added = delta(sample, "add_remove", "add", (1 - share) * at)
        assert (replaced <= removed + np.exp(share * at) * added + 1e-12).all()


@pytest.mark.parametrize("mechanism", [*EXAMPLES, Gaussian(1.0)], ids=repr)
def test_sample_of_a_sample_is_one_sample(mechanism: SingleMechanism) -> None:
    assert PoissonSampled(PoissonSampled(mechanism, 0.5), 0.25) == PoissonSampled(mechanism, 0.125)


def test_sample_of_a_sample_of_answers_is_enumerated() -> None:
    at, truth, null = epsilons(1, 100), response(1, 1.0, 2), response(0, 1.0, 2)
    twice = sampled(sampled(truth, null, 0.3), null, 0.5)
    mechanism = PoissonSampled(PoissonSampled(RandomizedResponse(1.0), 0.3), 0.5)
    assert_bounds(delta(mechanism, "add_remove", "remove", at), hockey_stick(twice, null, at), 1e-13)


@pytest.mark.parametrize("mechanism", [Laplace(3.0), ExponentialMechanism(0.5), ApproximateDP(0.5, 1e-3)], ids=repr)
def test_group_of_a_sampled_mechanism_is_a_sampled_group(mechanism: SingleMechanism) -> None:
    group = PoissonSampled(mechanism, 0.1).group(3)
    assert group.mechanism == mechanism.group(3)
    assert group.sampling_rate == pytest.approx(1 - 0.9**3, rel=1e-14)


def test_groups_shift_the_sensitivity() -> None:
    assert Laplace(3.0).group(2) == Laplace(1.5)
    assert ExponentialMechanism(0.5).group(3) == ExponentialMechanism(1.5)


# -- discrete losses in general ----------------------------------------------------------------------------------------

EXTREME = [1e-12, 1e-8, 1e-3, 1.0, 30.0, 500.0, 1e4]


@pytest.mark.parametrize("epsilon", EXTREME)
@pytest.mark.parametrize("rate", [1.0, 1 - 1e-12, 0.5, 1e-3, 1e-9])
def test_extreme_parameters_give_proper_losses(epsilon: float, rate: float) -> None:
    mechanisms = [
        Laplace(1 / epsilon),
        RandomizedResponse(epsilon),
        RandomizedResponse(epsilon, 10),
        ExponentialMechanism(epsilon),
        ApproximateDP(epsilon, 0.0),
        ApproximateDP(epsilon, 1e-30),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mechanism, pair in itertools.product(mechanisms, PAIRS):
            loss = PoissonSampled(mechanism, rate).loss(*pair)
            if isinstance(loss, GaussianLoss):  # two steps of a guarantee whose delta becomes 1
                assert loss.mu == math.inf
                assert isinstance(mechanism, ApproximateDP)
                assert mechanism.stated_delta * math.exp(min(epsilon, 700.0)) >= 1
                continue
            assert isinstance(loss, AtomicLoss)
            assert np.isfinite(loss.losses).all()
            assert (np.diff(loss.losses) > 0).all()
            assert (loss.masses > 0).all()
            assert math.fsum((*loss.masses, loss.infinite)) == pytest.approx(1, abs=1e-13)
            assert math.fsum((*loss.masses, loss.infinite)) >= 1 - 1e-15
            with np.errstate(over="ignore"):
                assert (loss.masses * np.exp(-loss.losses)).sum() <= 1 + 1e-9


@pytest.mark.parametrize("mechanism", EXAMPLES, ids=repr)
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_mechanisms_share_one_loss(mechanism: SingleMechanism, pair: tuple[Adjacency, Direction]) -> None:
    again = mechanism_from_dict(mechanism.to_dict())
    assert isinstance(again, SingleMechanism)
    assert again.loss(*pair) is mechanism.loss(*pair)
    assert PoissonSampled(again, 0.2).loss(*pair) is PoissonSampled(mechanism, 0.2).loss(*pair)


def test_more_than_can_be_counted_is_no_privacy() -> None:
    for mechanism in (Laplace(1e-9), Laplace(5e-324), ExponentialMechanism(1e300), RandomizedResponse(1e9)):
        assert mechanism.loss("add_remove", "remove") == GaussianLoss(math.inf)
    assert ApproximateDP(0.0, 1.0).loss("add_remove", "add") == GaussianLoss(math.inf)
    half = PoissonSampled(ApproximateDP(0.0, 1.0), 0.5)
    assert delta(half, "add_remove", "remove", np.array([0.0, 5.0])) == pytest.approx([0.5, 0.5])


def test_delta_of_atoms_is_their_hand_loop() -> None:
    loss = AtomicLoss(np.array([-1.0, 0.5, 2.0]), np.array([0.3, 0.4, 0.2]), 0.1)
    at = np.array([[-2.0, 0.0], [1.0, 3.0]])
    by_hand = [
        [
            sum(m * max(0.0, 1 - math.exp(e - x)) for x, m in zip(loss.losses, loss.masses, strict=True)) + 0.1
            for e in row
        ]
        for row in at
    ]
    assert atomic_delta(loss, at) == pytest.approx(np.array(by_hand), rel=1e-12)
    assert atomic_delta(loss, np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("seed", range(20))
def test_chained_pair_is_the_best_split_of_two_profiles(seed: int) -> None:
    random = np.random.default_rng(seed)
    (p, r, q), at = three_outputs(random), epsilons(3, 100, seed)
    first, second = as_pair(p, r), as_pair(r, q)
    chain = first.chained(second)
    splits = np.concatenate([np.linspace(-8, 8, 4001), first.losses])
    best = [(first.delta(splits) + np.exp(splits) * second.delta(e - splits)).min() for e in at]
    assert_bounds(chain.delta(at), hockey_stick(p, q, at))
    assert_bounds(np.array(best), chain.delta(at), 0.01)
    assert_bounds(chain.reverse.delta(at), hockey_stick(q, p, at))
    assert chain.p.sum() + chain.p_only == pytest.approx(1, abs=1e-13)
    assert chain.q.sum() + chain.q_only == pytest.approx(1, abs=1e-13)


def as_pair(p: Floats, q: Floats) -> AtomicPair:
    both = (p > 0) & (q > 0)
    order = np.argsort(p[both] / q[both])
    losses = np.log(p[both] / q[both])[order]
    return AtomicPair(losses, p[both][order], q[both][order], p[q == 0].sum(), q[p == 0].sum())


def test_two_laplace_moves_chain_to_one_of_twice_the_length() -> None:
    once, twice = Laplace(2.0).pair("add_remove"), Laplace(2.0).pair("replace_one")
    at = np.linspace(-1.2, 1.2, 100)
    assert once.chained(once.reverse).delta(at) == pytest.approx(twice.delta(at), abs=1e-7)


def connected(points: Floats, deltas: Floats) -> AtomicPair:
    pair = connect_the_dots(points, deltas)
    assert pair.p.sum() + pair.p_only == pytest.approx(1, abs=1e-13)
    assert pair.reverse.delta(points) == pytest.approx(pair.delta(points), rel=1e-12)
    return pair


def test_dots_are_connected_by_lines_in_the_exponential() -> None:
    points = np.linspace(0, 2, 30)
    deltas = -np.expm1((points - 2) / 2)
    pair, at = connected(points, deltas), np.random.default_rng(2).uniform(0, 2, 500)
    assert pair.delta(at) == pytest.approx(np.interp(np.exp(at), np.exp(points), deltas), rel=1e-9)
    assert_bounds(pair.delta(points), deltas, 1e-11)


def test_dots_above_a_line_are_left_out() -> None:
    points, deltas = np.array([0.0, 1.0, 2.0]), np.array([0.5, 0.49, 0.1])
    at = np.linspace(0, 2, 20)
    line = np.interp(np.exp(at), np.exp([0, 2]), [0.5, 0.1])
    pair = connected(points, deltas)
    assert pair.delta(at) == pytest.approx(line, rel=1e-10)
    assert pair.p_only == pytest.approx(0.1)


def test_dots_above_the_line_to_their_mirror_image_are_left_out() -> None:
    points, deltas = np.array([0.0, 1.0]), np.array([0.9, 0.0])
    at = np.linspace(-2, 1, 20)
    response_of_one = RandomizedResponse(1.0).loss("replace_one", "replace")
    assert isinstance(response_of_one, AtomicLoss)
    assert connected(points, deltas).delta(at) == pytest.approx(atomic_delta(response_of_one, at), rel=1e-10)


def test_connected_dots_equal_the_density_written_down() -> None:
    pair = Laplace(0.5).pair("add_remove")
    points = pair.losses[pair.losses >= 0]
    again = connected(points, -np.expm1((points - 2) / 2))
    assert again.losses == pytest.approx(pair.losses)
    assert again.p == pytest.approx(pair.p, rel=1e-5)


# -- as values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [*EXAMPLES, ApproximateDP(0, 1, "replace_one"), ApproximateDP(2, 0, "zero_out")])
def test_plain_data_round_trip(mechanism: SingleMechanism) -> None:
    together = Composition(((mechanism, 3), (PoissonSampled(mechanism, 0.3), 2), (Gaussian(1.0), 1)))
    for value in (mechanism, PoissonSampled(mechanism, 0.3), together):
        assert mechanism_from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "geometric", "noise_multiplier": 1.0},
        {"kind": "laplace", "pure_epsilon": 1.0},
        {"kind": "randomized_response", "pure_epsilon": 1.0},
        {"kind": "approximate_dp", "stated_epsilon": 1.0, "stated_delta": 0.1},
        {"kind": "poisson_sampled", "sampling_rate": 0.1, "mechanism": {"kind": "geometric"}},
    ],
)
def test_stored_garbage_is_a_ledger_error(data: dict[str, object]) -> None:
    with pytest.raises(LedgerError):
        mechanism_from_dict(data)


@pytest.mark.parametrize("value", ["1.0", None, True, -1.0, 0.0, math.nan, math.inf, 1j])
def test_bad_parameters_are_refused(value: object) -> None:
    with pytest.raises(InvalidValueError, match="noise_multiplier"):
        Laplace(value)  # type: ignore[arg-type]
    for build in (RandomizedResponse, ExponentialMechanism):
        with pytest.raises(InvalidValueError, match="pure_epsilon"):
            build(value)  # type: ignore[arg-type]
    if value != 0:
        with pytest.raises(InvalidValueError, match="stated_epsilon"):
            ApproximateDP(value, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1, 0, 2.0, "2", True])
def test_bad_number_of_categories_is_refused(value: object) -> None:
    with pytest.raises(InvalidValueError, match="categories"):
        RandomizedResponse(1.0, value)  # type: ignore[arg-type]


def test_bad_statements_are_refused() -> None:
    for value in (-0.1, 1.1, "0", None, math.nan):
        with pytest.raises(InvalidValueError, match="stated_delta"):
            ApproximateDP(1.0, value)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="adjacency"):
        ApproximateDP(1.0, 0.1, "neighbour")  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", EXAMPLES, ids=repr)
@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True])
def test_bad_group_size_is_refused(mechanism: SingleMechanism, size: object) -> None:
    for value in (mechanism, PoissonSampled(mechanism, 0.5)):
        with pytest.raises(InvalidValueError, match="size"):
            value.group(size)  # type: ignore[arg-type]
