"""Finds the clip norm before the first update, as a private quantile of gradient norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_dp.accounting import ExponentialMechanism, Ledger, PoissonSampled
from lightning_dp.gradients import gradient_norms
from lightning_dp.releases import exponential_mechanism
from lightning_dp.strategies import budgeting
from lightning_dp.strategies.policy import Budget, ClipNormQuery
from lightning_dp.strategies.probing import loss_of_records
from lightning_dp.strategies.run import PrivateRun

PURPOSE = "clip norm"


def release_clip_norm(
    query: ClipNormQuery,
    module: LightningModule,
    run: PrivateRun,
    *,
    budget: Budget | None,
    rank: int,
    sum_over_processes: Callable[[Tensor], Tensor],
    same_everywhere: Callable[[int], int],
    insecure_seed: int | None,
) -> float:
    """Releases a quantile of the gradient norms of some records, by the exponential mechanism (Smith, 2011, Section 4).

    The records are a Poisson sample. A candidate is the better the nearer the number of records whose norm it covers
    is to ``quantile`` times all: one record more or less moves that by at most ``max(quantile, 1 - quantile)``.

    Args:
        query: What to find, and its price.
        module: The module, which must have passed the probe.
        run: Gives the records; its ledger gets the entry.
        budget: What must not be overspent.
        rank: Which share of the records this process looks at.
        sum_over_processes: Adds a vector up over all processes.
        same_everywhere: Gives all processes the value of the first one.
        insecure_seed: Makes the choice repeatable.

    Returns:
        The clip norm, one of ``query.candidates``, the same on all processes.

    Raises:
        BudgetExceededError: The price is more than what is left; nothing is released then.
    """
    rate = min(1.0, query.expected_records / run.plan.public_size)
    mechanism = PoissonSampled(ExponentialMechanism(query.epsilon), rate)
    budgeting.check_affordable(budget, run.ledger, mechanism, what="the clip norm")
    # PRIVACY: spent before a record is looked at.
    run.ledger.record(mechanism, release_id=run.release_id, purpose=PURPOSE)
    share = run.sample(rate)[rank :: run.plan.world_size]
    norms = gradient_norms(
        module,
        _batches(share, run.usual_size),
        engine=run.make_engine,
        loss=loss_of_records(module, run),
    )
    index = exponential_mechanism(
        utilities(sum_over_processes(excesses(norms, query))),
        sensitivity=max(query.quantile, 1 - query.quantile),
        epsilon=query.epsilon,
        ledger=Ledger(),  # the entry above says more: that the records were sampled
        insecure_seed=insecure_seed,
    )
    return query.candidates[same_everywhere(index)]


def excesses(norms: Tensor, query: ClipNormQuery) -> Tensor:
    """By how many records each candidate covers more than it should, ``(candidates,)`` in float64."""
    candidates = torch.tensor(query.candidates, dtype=norms.dtype, device=norms.device)
    covered = norms.unsqueeze(1) <= candidates  # a norm that is not finite is covered by none
    return (covered.double() - query.quantile).sum(0)


def utilities(excess: Tensor) -> list[float]:
    """How good each candidate is, given :func:`excesses` over all processes."""
    return (-excess.abs()).tolist()


def _batches(records: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(records), size):
        yield records[first : first + size]
