"""What a person is told when private training starts and ends."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_dp.accounting.guarantee import format_epsilon
from lightning_dp.callbacks.baseline import NonPrivateBaseline
from lightning_dp.callbacks.console import Statement
from lightning_dp.sampling import PublicDataLoader
from lightning_dp.strategies import PrivateMechanism

NOT_COVERED = (
    "what training_step logs (train_loss, training metrics): private records, no noise",
    "validation records, and checkpoints or settings chosen by looking at them",
    "ending early because of a result: quote the planned budget instead",
    "earlier runs on these records whose checkpoints were not given",
    "a person with several records: the unit is one record",
    "floating point, timing and memory; whoever controls the machine",
)
MONITORS_NOT_COVERED = "choices by {}: made on values without noise"
BASELINE_NOT_COVERED = "the comparison: its model was trained without privacy"


def opening_statement(trainer: Trainer, strategy: PrivateMechanism) -> Statement:
    """What is about to run."""
    facts = [*_declared(strategy), *_public_data(trainer), *_budget(strategy)]
    facts += [("not covered", text) for text in _monitors_not_covered(trainer)]
    return Statement("Private training starts", tuple(facts))


def closing_statement(
    trainer: Trainer,
    strategy: PrivateMechanism,
    *,
    metrics: Sequence[str] | None = None,
    exception: BaseException | None = None,
) -> Statement:
    """What has run, what it guarantees and what it does not.

    Args:
        trainer: For the logged metrics and the baseline.
        strategy: For the ledger.
        metrics: Names of the metrics to show; all that start with ``val`` if ``None``.
        exception: What ended training early, if anything did.
    """
    run = strategy.run
    guarantee = strategy.guarantee
    facts = [
        *_declared(strategy),
        *_public_data(trainer),
        ("updates", _updates(guarantee.num_updates, run.updates_run)),
        (
            "guarantee",
            f"epsilon = {format_epsilon(guarantee.epsilon)} at delta = {guarantee.delta:g}, from what actually ran",
        ),
        *(("also released", text) for text in _other_releases(strategy)),
        *(("NOT VALID AS STATED", stamp) for stamp in guarantee.stamps),
        *_metrics(trainer, metrics),
    ]
    title = "Private training ended" if exception is None else f"Private training ended by {type(exception).__name__}"
    not_covered = [*NOT_COVERED, *_monitors_not_covered(trainer)]
    if any(isinstance(callback, NonPrivateBaseline) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        not_covered.append(BASELINE_NOT_COVERED)
    return Statement(title, tuple(facts), tuple(not_covered))


def _declared(strategy: PrivateMechanism) -> tuple[tuple[str, str], ...]:
    run = strategy.run
    plan = run.plan
    size = "declared, the true size is hidden" if plan.is_size_declared else "public"
    batch = plan.expected_batch_size
    return (
        ("covered", "the rows of the training data set, and no others"),
        ("unit", "one record (one element of the training data set)"),
        ("adjacency", "add_remove (one record present or absent)"),
        ("N", f"{plan.public_size:,} ({size})"),
        ("sampling", f"Poisson, rate q = {plan.sampling_rate:.6g}, {plan.updates_per_epoch} updates an epoch"),
        ("expected batch", f"{batch:.6g} records, {batch / plan.world_size:.6g} per process"),
        ("noise multiplier", f"{run.noise_multiplier:.6g}"),
        ("clip norm", run.bound),
    )


def _public_data(trainer: Trainer) -> list[tuple[str, str]]:
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    public = [len(loader.dataset) for loader in loaders if isinstance(loader, PublicDataLoader)]  # type: ignore[arg-type]
    return [("public data", f"{size:,} records of a PublicDataLoader, not protected") for size in public]


def _monitors_not_covered(trainer: Trainer) -> list[str]:
    """Names what decides by a logged value, other than what this package logs."""
    found = [
        (type(callback).__name__, callback.monitor)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(getattr(callback, "monitor", None), str)
    ]
    found += [
        (type(config.scheduler).__name__, config.monitor)
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau and config.monitor is not None
    ]
    shown = [f"{name}(monitor={monitor!r})" for name, monitor in found if not monitor.startswith("privacy/")]
    return [MONITORS_NOT_COVERED.format(", ".join(shown))] if shown else []


def _budget(strategy: PrivateMechanism) -> tuple[tuple[str, str], ...]:
    run = strategy.run
    budget = strategy.budget
    if budget is None:
        return (("budget", "none: the noise multiplier is fixed and epsilon grows with every update"),)
    allowed = "" if run.updates_allowed is None else f", at most {run.updates_allowed:,} updates in this run"
    return (("budget", f"epsilon = {budget.epsilon:g} at delta = {budget.delta:g}{allowed}"),)


def _updates(total: int, this_run: int) -> str:
    return f"{total:,}" if total == this_run else f"{total:,}, of which {this_run:,} in this run"


def _other_releases(strategy: PrivateMechanism) -> list[str]:
    """What the guarantee pays for beside updates."""
    delta = strategy.guarantee.delta
    return [
        f"{entry.purpose}, epsilon = {format_epsilon((entry.count * entry.mechanism).epsilon(delta))} by itself"
        for entry in strategy.ledger.entries
        if entry.purpose != "training"
    ]


def _metrics(trainer: Trainer, names: Sequence[str] | None) -> list[tuple[str, str]]:
    logged = trainer.callback_metrics
    shown = [name for name in logged if name.startswith("val")] if names is None else list(names)
    facts = [(name, f"{float(logged[name]):.4f}") for name in shown if name in logged]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, NonPrivateBaseline):
            facts += [(f"{name} without privacy", f"{value:.4f}") for name, value in callback.result.items()]
    return facts
