"""Composition of bare (epsilon, delta) guarantees, where nothing but the two numbers is known of a mechanism.

Where the mechanisms themselves are known, composing those gives a smaller epsilon, and an exact one:
``(a + b).epsilon(delta)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from lightning_dp import _validate
from lightning_dp.accounting.mechanisms import Gaussian, Mechanism, PoissonSampled
from lightning_dp.accounting.mechanisms.base import checked
from lightning_dp.errors import InvalidValueError

_ROUNDING = 1 + 1e-14


def basic_composition(guarantees: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Everything with these guarantees, released about the same records.

    Epsilons add and deltas add (Dwork, Kenthapadi, McSherry, Mironov, Naor 2006, Theorem 1). Each mechanism may be
    chosen from earlier outputs, as long as its epsilon and delta are not.

    Args:
        guarantees: Pairs ``(epsilon, delta)``, all under the same adjacency and unit.

    Returns:
        Epsilon, and delta, which is at most 1; 1 says nothing.

    Raises:
        InvalidValueError: A number is out of range.

    Example:
        >>> basic_composition([(1.0, 0.25), (0.5, 0.5)])
        (1.5, 0.75)
    """
    pairs = [(_validate.non_negative("epsilon", epsilon), _checked_delta(delta)) for epsilon, delta in guarantees]
    return math.fsum(epsilon for epsilon, _ in pairs), min(1.0, math.fsum(delta for _, delta in pairs))


def advanced_composition(*, epsilon: float, delta: float, count: int, slack: float) -> tuple[float, float]:
    """``count`` mechanisms with the same guarantee, released about the same records.

    ``sqrt(2 count log(1/slack)) epsilon + count epsilon (exp(epsilon) - 1)`` at ``count delta + slack`` (Dwork,
    Rothblum, Vadhan 2010, Theorem III.3). Better than adding up where epsilon is small and the count large; the
    smaller of the two may be used. Each mechanism may be chosen from earlier outputs; epsilon, delta and the count are
    fixed in advance.

    Args:
        epsilon: Of each mechanism, at least 0.
        delta: Of each mechanism, in [0, 1).
        count: Number of mechanisms, at least 1.
        slack: Added to delta, in (0, 1).

    Returns:
        Epsilon, and delta, which is at most 1; 1 says nothing.

    Raises:
        InvalidValueError: A number is out of range.

    Example:
        >>> epsilon, delta = advanced_composition(epsilon=0.01, delta=0.0, count=10_000, slack=1e-5)
        >>> round(epsilon, 4), delta
        (5.8035, 1e-05)
    """
    epsilon, delta = _validate.non_negative("epsilon", epsilon), _checked_delta(delta)
    count, slack = _validate.integer("count", count, 1), _validate.delta(slack, "slack")
    drift = epsilon * math.expm1(epsilon) if epsilon < 700 else math.inf
    total = epsilon * math.sqrt(-2 * count * math.log(slack)) + count * drift
    return total * _ROUNDING, min(1.0, (count * delta + slack) * (_ROUNDING if delta else 1.0))


def group_privacy(*, epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """What a guarantee for one record says about ``size`` records that come and go together.

    ``size * epsilon`` at ``delta (exp(size * epsilon) - 1) / (exp(epsilon) - 1)``: the guarantee chained over ``size``
    data sets, each a neighbour of the next, so that delta grows to ``delta * sum_{i < size} exp(i * epsilon)``
    (Vadhan 2017, Lemma 2.2, whose last step rounds that sum up). Where the mechanism is known,
    ``mechanism.group(size)`` gives a smaller number.

    Args:
        epsilon: For one record, at least 0.
        delta: For one record, in [0, 1).
        size: Number of records, at least 1.

    Returns:
        Epsilon, and delta, which is at most 1; 1 says nothing.

    Raises:
        InvalidValueError: A number is out of range.

    Example:
        >>> epsilon, delta = group_privacy(epsilon=1.0, delta=1e-6, size=3)
        >>> epsilon, f"{delta:.4g}"
        (3.0, '1.111e-05')
    """
    epsilon, delta = _validate.non_negative("epsilon", epsilon), _checked_delta(delta)
    size = _validate.integer("size", size, 1)
    if size == 1 or delta == 0:
        return size * epsilon, delta
    if epsilon == 0:
        return 0.0, min(1.0, size * delta)
    # (exp(size * epsilon) - 1) / (exp(epsilon) - 1), without overflow
    log_factor = (size - 1) * epsilon + math.log(math.expm1(-size * epsilon) / math.expm1(-epsilon))
    log_delta = log_factor + math.log(delta)
    return size * epsilon, min(1.0, math.exp(min(log_delta, 0.0)) * (1 + 1e-13))


def central_limit_epsilon_not_a_bound(mechanism: Mechanism, delta: float) -> float:
    """What the central limit theorem makes of Poisson-sampled Gaussian steps. An approximation, often from below.

    The composition is replaced by one Gaussian mechanism with ``mu**2 = sum_j q_j**2 T_j (exp(1/sigma_j**2) - 1)``
    (Bu, Dong, Long, Su 2020, for one phase; the sum over phases by the same limit). It is exact where nothing is
    sampled, and otherwise right only in the limit of many steps of small rate. One step with ``q = 0.01``,
    ``sigma = 1`` at ``delta = 1e-5`` comes out at 0.037, where the true epsilon is 0.199. It is here for comparison
    with published numbers; a guarantee is what ``mechanism.epsilon(delta)`` returns.

    Args:
        mechanism: Gaussian and Poisson-sampled Gaussian steps, composed.
        delta: In (0, 1).

    Returns:
        The approximate epsilon, for ``add_remove``.

    Raises:
        InvalidValueError: There are other mechanisms in the composition, or ``delta`` is out of range.

    Example:
        >>> step = PoissonSampled(Gaussian(1.0), sampling_rate=0.01)
        >>> round(central_limit_epsilon_not_a_bound(step, 1e-5), 3), round(step.epsilon(1e-5), 3)
        (0.037, 0.199)
    """
    delta = _validate.delta(delta)
    mu = math.sqrt(
        math.fsum(count * _limit_variance(single) for single, count in checked("mechanism", mechanism).phases)
    )
    if mu == 0:
        return 0.0
    return Gaussian(0.0 if math.isinf(mu) else 1 / mu).epsilon(delta)


def _limit_variance(single: Mechanism) -> float:
    """``mu**2`` of one step: exact for a plain Gaussian, in the limit for a sampled one."""
    rate, step = (single.sampling_rate, single.mechanism) if isinstance(single, PoissonSampled) else (1.0, single)
    if not isinstance(step, Gaussian):
        raise InvalidValueError(
            f"`mechanism` must consist of Gaussian and Poisson-sampled Gaussian steps, got {single!r}: the central"
            " limit is stated for those only. Use `mechanism.epsilon(delta)`."
        )
    squared = step.noise_multiplier**-2 if step.noise_multiplier > 1e-150 else math.inf
    if rate == 1:
        return squared
    return rate**2 * (math.expm1(squared) if squared < 700 else math.inf)


def _checked_delta(value: float) -> float:
    result = _validate.number("delta", value)
    if not 0 <= result < 1:
        raise InvalidValueError(f"`delta` must be at least 0 and below 1, got {value!r}.")
    return result
