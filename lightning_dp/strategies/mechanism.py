"""The mechanism inside Lightning's own training loop: each hook calls the one it overrides and delegates."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dp import _packages, _validate
from lightning_dp.accounting import Guarantee, Ledger
from lightning_dp.accounting.ledger import new_release_id
from lightning_dp.errors import (
    InvalidValueError,
    LedgerError,
    MixedRecordsError,
    PrivacyError,
    PrivacyViolationError,
    TrainerSettingsError,
    UnsupportedDataError,
    UnsupportedModelError,
)
from lightning_dp.gradients import (
    BookKeepingEngine,
    Clipping,
    ClippingRule,
    FlatClipping,
    GradientEngine,
    GradientMemory,
    HookEngine,
)
from lightning_dp.replacements import replace_unsupported
from lightning_dp.sampling import PublicDataLoader, check_loader, fingerprint, insecure_key, secret_key
from lightning_dp.strategies import budgeting, loaders, resuming, settings
from lightning_dp.strategies.clip_norm import release_clip_norm
from lightning_dp.strategies.null_batch import unseen
from lightning_dp.strategies.policy import Budget, ClipNormQuery, PrivacyPolicy, find_clip_norm_query, find_policy
from lightning_dp.strategies.probing import probe_module
from lightning_dp.strategies.run import PrivateRun
from lightning_dp.strategies.sampling_plan import plan_sampling

CHECKPOINT_KEY = "lightning_dp"

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class PrivateMechanism(Strategy):
    """Makes a Lightning strategy train privately. Not used alone: combined with a strategy that owns the devices.

    Args:
        noise_multiplier: Standard deviation of the noise over ``max_grad_norm`` (over the sensitivity of ``clipping``,
            where that is another one), at least 0. ``None``: found by a
            ``PrivacyBudget``. There is no default noise.
        max_grad_norm: Largest L2 norm of one record's gradient over all parameters together.
        clipping: How gradients are brought to that norm: :class:`FlatClipping` (the default),
            :class:`PerLayerClipping`, :class:`AutomaticClipping` or :class:`AdaptiveClipping`.
        sampling_rate: Probability that a record takes part in one update. ``None``: ``batch_size *
            accumulate_grad_batches * processes / N``.
        delta: The delta at which ``guarantee`` is given when no callback says one.
        public_size: A size of the data set that may be published in place of the true one, which is then hidden.
        previous_checkpoints: Checkpoints of earlier private runs on the same records, whose spending is carried on.
            A checkpoint given as ``ckpt_path`` carries its own.
        allow_missing_ledger: Resume a checkpoint that has steps but no ledger. What it spent is unknown, which is
            stamped on the guarantee.
        gradient_engine: ``"bookkeeping"``: the clipped sum without the gradient of any record where a layer allows it,
            at nearly the price of plain training. ``"hooks"``: every record's gradient written out, through Opacus;
            slow, for diagnostics. Both give the same numbers up to rounding.
        gradient_memory: What the engine may keep for speed: ``"speed"``: anything; ``"balanced"``: as much as the
            inputs and output gradients of the layers take; ``"low"``: nothing; or a number of bytes.
        gradient_methods: Fixes the engine's way to the norm by name of the parameter, in the form in which a run logs
            what it found fastest.
        replace_unsupported: Replace, in the module itself and before the optimizer is made, layers whose records cannot
            be told apart by ones with the same weights; see :func:`replace_unsupported`.
        allow_mixed_records: Train although the gradient of one record depends on others of its batch, or the module
            keeps something of them. What was found is warned about and stamped on the guarantee, which then claims
            nothing.
        insecure_seed: Derive sampling and noise from this number instead of the operating system. Anyone who knows it
            can subtract the noise; for tests, and stamped on the guarantee.
    """

    global_rank: int
    world_size: int

    def __init__(
        self,
        *,
        noise_multiplier: float | None = None,
        max_grad_norm: float = 1.0,
        clipping: ClippingRule | None = None,
        sampling_rate: float | None = None,
        delta: float | None = None,
        public_size: int | None = None,
        previous_checkpoints: Sequence[str] = (),
        allow_missing_ledger: bool = False,
        gradient_engine: Literal["bookkeeping", "hooks"] = "bookkeeping",
        gradient_memory: GradientMemory | int = "balanced",
        gradient_methods: Mapping[str, str] | None = None,
        replace_unsupported: bool = False,
        allow_mixed_records: bool = False,
        insecure_seed: int | None = None,
    ) -> None:
        super().__init__()
        _packages.watch_for_other_package(type(self))
        self._fixed_noise_multiplier = _validate.optional(_validate.non_negative, "noise_multiplier", noise_multiplier)
        self.max_grad_norm = _validate.positive("max_grad_norm", max_grad_norm)
        self.clipping = _checked_rule(clipping)
        self.sampling_rate = _validate.optional(_validate.probability, "sampling_rate", sampling_rate)
        self.delta = None if delta is None else _validate.delta(delta)
        self.public_size = _validate.optional(_validate.integer, "public_size", public_size, minimum=1)
        self.previous_checkpoints = _validate.strings("previous_checkpoints", previous_checkpoints)
        self.allow_missing_ledger = _validate.flag("allow_missing_ledger", allow_missing_ledger)
        self.gradient_engine = _validate.choice("gradient_engine", gradient_engine, ("bookkeeping", "hooks"))
        self.gradient_memory = _checked_memory(gradient_memory)
        self.gradient_methods = _validate.string_map("gradient_methods", gradient_methods or {})
        self.replace_unsupported = _validate.flag("replace_unsupported", replace_unsupported)
        self.allow_mixed_records = _validate.flag("allow_mixed_records", allow_mixed_records)
        self.insecure_seed = _validate.optional(_validate.integer, "insecure_seed", insecure_seed, minimum=0)
        self.ledger = Ledger()
        self._run: PrivateRun | None = None
        self._policy = PrivacyPolicy()
        self._policy_delta: float | None = None
        self._num_records: int | None = None
        self._clip_norm_query: ClipNormQuery | None = None
        self._loaded_clip_norm: float | None = None
        self._has_loaded_clip_norm = False
        self._runs = 0
        self._user_settings: dict[str, Any] = {}
        self._stepping = False
        self._step_guards: list[RemovableHandle] = []

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee for everything this process knows to have been released, from what actually ran.

        Raises:
            InvalidValueError: No delta was given to the strategy, a budget or a monitor.
        """
        if self.reporting_delta is None:
            raise InvalidValueError(
                "A guarantee needs a delta. Give `PrivateStrategy(delta=1e-5)`, a `PrivacyBudget` or a"
                " `PrivacyMonitor(delta=1e-5)` and call `fit`, or ask `strategy.ledger.guarantee(delta=1e-5)`."
            )
        return self.ledger.guarantee(self.reporting_delta, num_records=self._num_records)

    @property
    def reporting_delta(self) -> float | None:
        """The delta at which epsilon is reported: the budget's or monitor's, else the strategy's own."""
        return self.delta if self._policy_delta is None else self._policy_delta

    @property
    def run(self) -> PrivateRun:
        """The run at hand, or the last one.

        Raises:
            PrivacyViolationError: ``fit`` has not been called.
        """
        if self._run is None:
            raise PrivacyViolationError("There is no private run: `trainer.fit` has not been called.")
        return self._run

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier that was given, else the one found for the last run, else ``None``."""
        if self._fixed_noise_multiplier is not None or self._run is None or not self._run.is_started:
            return self._fixed_noise_multiplier
        return self._run.noise_multiplier

    @property
    def budget(self) -> Budget | None:
        """What must not be overspent, if a callback said so."""
        return self._policy.budget

    # -- set-up ------------------------------------------------------------------------------------------------------

    @override
    def connect(self, model: LightningModule) -> None:
        _packages.check_package(model, model.trainer, model.trainer.datamodule)  # type: ignore[attr-defined]
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self._trainer
        self._policy = find_policy(trainer)
        self._policy_delta = self._policy.reporting_delta
        self._clip_norm_query = find_clip_norm_query(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        settings.check_trainer(trainer)
        if self._fixed_noise_multiplier is None:
            if self.budget is None:
                raise TrainerSettingsError(
                    "Private training has neither a noise multiplier nor a budget to find one for, and there is no"
                    " default noise. Add `callbacks=[lightning_dp.PrivacyBudget(epsilon=3, delta=1e-5)]`, or give"
                    " `strategy=lightning_dp.PrivateStrategy(noise_multiplier=1.0)`."
                )
            settings.check_endless(trainer)
        for path in self.previous_checkpoints:
            self._merge_ledger(_plain_values(path), path)
        budgeting.check_open(self.budget, self.ledger)

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        if self.replace_unsupported:
            replaced = replace_unsupported(self._module)
            if replaced:
                shown = ", ".join(f"{path} ({kind})" for path, kind in replaced.items())
                rank_zero_info(f"Replaced for private training: {shown}.")
        settings.check_module(self._module)
        self.clipping.check([name for name, _ in self._module.named_parameters()])
        self._user_settings = settings.settings_of(trainer)
        if settings.is_fast_dev_run(trainer):
            # A quick check runs whole updates: one physical batch each.
            trainer.accumulate_grad_batches = 1
        # Before the optimizers: `configure_optimizers` may ask for `trainer.estimated_stepping_batches`, which builds
        # the loader.
        self._run = PrivateRun(
            self._module,
            make_engine=self._make_engine,
            clipping=Clipping(self.clipping, self._first_clip_norm()),
            key=self._new_key(),
            ledger=self.ledger,
            release_id=self.broadcast(new_release_id()),
            watch_parameters=self._module.automatic_optimization,
            watch_buffers=not self.allow_mixed_records,
        )
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with settings.one_optimizer():
            super().setup_optimizers(trainer)
        settings.check_optimizers(self.optimizers, self._module)
        self._step_guards = [o.register_step_pre_hook(self._refuse_bare_step) for o in self.optimizers]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        if isinstance(dataloader, PublicDataLoader):
            return dataloader
        loader = check_loader(dataloader)
        plan = plan_sampling(
            loader,
            num_chunks=trainer.accumulate_grad_batches,
            world_size=self.world_size,
            sampling_rate=self.sampling_rate,
            public_size=self.public_size,
        )
        if self.reporting_delta is not None:
            _validate.delta_below_one_record(self.reporting_delta, plan.public_size)
        if len(set(self._from_all_processes((plan.num_records, fingerprint(loader.dataset))))) > 1:
            # PRIVACY: a record with different positions on two processes could enter an update twice.
            raise UnsupportedDataError(
                f"The training data differs from process to process (this one has {plan.num_records} records). All"
                " processes draw from the same data set, of which each gets its share, so every one must hold all"
                " records in the same order: do not shard them, and give `random_split` a generator with a fixed seed."
            )
        self._num_records = plan.public_size
        return self.run.make_loader(loader, plan, self.global_rank)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.prepare_run()
        try:
            self._admit_module()
        except PrivacyError:
            raise
        except Exception as error:
            # It may need what a later hook, such as `on_train_epoch_start`, sets. Before the first batch it is tried
            # again, and its own error is raised.
            _log.debug("`training_step` cannot be checked yet: %s", error)

    def _admit_module(self) -> None:
        run = self.run
        if not run.gradients.is_attached:
            for finding in probe_module(self._module, run, accept_mixed=self.allow_mixed_records):
                self._accept_finding(finding)
            run.gradients.attach()

    def _accept_finding(self, finding: MixedRecordsError) -> None:
        rank_zero_warn(f"Training goes on without a guarantee (`allow_mixed_records=True`). {finding}")
        # PRIVACY: clipping bounds no record's influence any more, which whoever reads the guarantee must know.
        self.ledger.stamp(f"records mix: {str(finding).split('. ')[0]}")

    def prepare_run(self) -> None:
        """Fixes the noise; called when training starts, does nothing the second time.

        Raises:
            CalibrationError: No noise meets the budget.
            BudgetExceededError: The budget is spent.
        """
        run, trainer = self.run, self._trainer
        if run.is_started:
            return
        loaders.check_batches(trainer, run)
        resuming.restart_update(trainer, run.plan.num_chunks)
        remaining = settings.updates_to_run(trainer)
        self._find_clip_norm()
        noise_multiplier = self._fixed_noise_multiplier
        if noise_multiplier is None:
            assert remaining is not None
            noise_multiplier = self._policy.choose_noise_multiplier(
                sampling_rate=run.plan.sampling_rate, num_updates=remaining, spent=self.ledger.composition()
            )
            assert noise_multiplier is not None
        run.start(noise_multiplier)
        if self.budget is not None:
            run.updates_allowed = budgeting.limit_updates(trainer, run, self.budget, remaining)

    def _find_clip_norm(self) -> None:
        run = self.run
        if self._clip_norm_query is None or self._has_loaded_clip_norm:
            return
        try:
            # PRIVACY: a quantile of norms bounds one record's part only if its norm depends on that record alone.
            self._admit_module()
        except PrivacyError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"The clip norm is found before `on_train_start` of the module, where `training_step` fails:"
                f" {type(error).__name__}: {error} Set up what it needs in `setup` or `on_fit_start`."
            ) from error
        norm = release_clip_norm(
            self._clip_norm_query,
            self._module,
            run,
            budget=self.budget,
            rank=self.global_rank,
            sum_over_processes=self._sum_over_processes,
            same_everywhere=self.broadcast,
            insecure_seed=self.insecure_seed,
        )
        run.change_clip_norm(norm)

    # -- one update --------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        run, manual = self.run, not self._module.automatic_optimization
        loaders.check_batches(self._trainer, run)
        self._admit_module()
        info = run.begin_chunk()
        # PRIVACY: a batch without records is seen by nobody: not by logs, not by metrics, not by the sum.
        with unseen(self._module, alone=self.world_size == 1) if info.num_records == 0 else nullcontext():
            output = super().training_step(*args, **kwargs)
        run.check_forward()
        if output is None and not manual:
            raise UnsupportedModelError(
                "`training_step` returned None to skip a batch. Whether an update happens would then depend on the"
                " data. Return a loss for every batch; weight a record by 0 to leave it out."
            )
        return output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        run, module = self.run, self._module
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Lightning divides the loss by `accumulate_grad_batches`; norms are those of the undivided loss.
        scale = run.plan.num_chunks if module.automatic_optimization else 1
        loss = closure_loss * scale
        try:
            run.gradients.prepare(loss)
            if _has_own_backward(module) or args or kwargs:
                self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            else:
                run.gradients.backward(loss)
        except BaseException:
            run.gradients.drop_raw()
            raise
        # PRIVACY: raw gradients are gone before `on_after_backward`, the first hook that could read them.
        run.end_chunk()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def release_after_closure() -> Any:
            result = closure()
            self.run.release(is_global_zero=self.is_global_zero, reduce=self._sum_over_processes)
            # PRIVACY: a parameter group that was added later may hold parameters that no hook covers.
            settings.check_optimizers(self.optimizers, self._module)
            return result

        # PRIVACY: inside the closure, so that `on_before_optimizer_step`, gradient clipping and the optimizer, which
        # come after it, see the noisy gradient only.
        self._stepping = True
        try:
            return super().optimizer_step(optimizer, release_after_closure, model, **kwargs)
        finally:
            self._stepping = False

    def _refuse_bare_step(self, optimizer: Optimizer, *_: Any) -> None:
        # PRIVACY: `optimizer.optimizer.step()` goes around the strategy, and would apply whatever is in `.grad`.
        if not self._stepping:
            self.run.gradients.drop_raw()
            raise PrivacyViolationError(
                f"`{type(optimizer).__name__}.step()` was called on the bare optimizer, past noise and ledger. Use the"
                " optimizer that `self.optimizers()` returns."
            )

    # -- checkpoints and end -----------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # PRIVACY: here and not in a callback's state, which files with `save_weights_only=True` leave out.
        checkpoint[CHECKPOINT_KEY] = {"ledger": self.ledger.state_dict()}
        if self._moves_clip_norm and self._run is not None:
            checkpoint[CHECKPOINT_KEY]["clip_norm"] = self._run.clipping.max_norm
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # Lightning added `weights_only` in 2.6.
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if CHECKPOINT_KEY in checkpoint or (fitting and checkpoint.get("global_step", 0) > 0):
            self._merge_ledger(checkpoint, checkpoint_path)
        if fitting:
            budgeting.check_open(self.budget, self.ledger)
            self._loaded_clip_norm = checkpoint.get(CHECKPOINT_KEY, {}).get("clip_norm")
        return checkpoint

    @override
    def teardown(self) -> None:
        if self._run is not None:
            self._run.close()
        for handle in self._step_guards:
            handle.remove()
        self._step_guards = []
        if self._user_settings:
            trainer = self._trainer
            trainer.fit_loop.epoch_loop.max_steps = self._user_settings["max_steps"]
            trainer.accumulate_grad_batches = self._user_settings["accumulate_grad_batches"]
            self._user_settings = {}
        super().teardown()

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    def _make_engine(self, module: Module) -> GradientEngine:
        if self.gradient_engine == "hooks":
            return HookEngine(module)
        return BookKeepingEngine(module, memory=self.gradient_memory, methods=self.gradient_methods)

    @property
    def _moves_clip_norm(self) -> bool:
        """Whether the clip norm may be another one than was given."""
        return self.clipping.is_adaptive or self._clip_norm_query is not None

    def _first_clip_norm(self) -> float:
        """That of the resumed run where it moves, else what was given."""
        loaded, self._loaded_clip_norm = self._loaded_clip_norm, None
        self._has_loaded_clip_norm = loaded is not None and self._moves_clip_norm
        return loaded if loaded is not None and self._moves_clip_norm else self.max_grad_norm

    def _new_key(self) -> bytes:
        self._runs += 1
        if self.insecure_seed is not None:
            self.ledger.stamp(f"sampling and noise follow from insecure_seed={self.insecure_seed}")
            return insecure_key(self.insecure_seed, self._runs)
        return self.broadcast(secret_key())

    def _from_all_processes(self, value: _T) -> list[_T]:
        """What each process has."""
        return [value]

    def _sum_over_processes(self, total: Tensor) -> Tensor:
        """The sum of a vector over all processes."""
        return total

    def _merge_ledger(self, checkpoint: Mapping[str, Any], path: str | Path) -> None:
        if CHECKPOINT_KEY in checkpoint:
            self.ledger.merge(checkpoint[CHECKPOINT_KEY]["ledger"])
        elif self.allow_missing_ledger:
            self.ledger.stamp(f"continues `{path}`, which has no ledger: what it spent is unknown")
        else:
            raise LedgerError(
                f"`{path}` holds {checkpoint.get('global_step', 0)} training steps but no ledger, so what they spent is"
                " unknown: it was not trained privately, or not by this package. If these steps saw public data only,"
                " give `PrivateStrategy(allow_missing_ledger=True)`, which is stamped on the guarantee."
            )


def _has_own_backward(module: LightningModule) -> bool:
    """Whether the user's module runs its backward pass in its own way."""
    return type(module).backward is not LightningModule.backward


def _checked_rule(rule: object) -> ClippingRule:
    if rule is None:
        return FlatClipping()
    if not isinstance(rule, ClippingRule):
        raise InvalidValueError(
            f"`clipping` must be a clipping rule, such as `lightning_dp.AutomaticClipping()`, got {rule!r} of type"
            f" {type(rule).__name__}."
        )
    return rule


def _checked_memory(memory: object) -> GradientMemory | int:
    if isinstance(memory, str):
        names: tuple[GradientMemory, ...] = ("speed", "balanced", "low")
        return _validate.choice("gradient_memory", memory, names)
    return _validate.integer("gradient_memory", memory, minimum=0)


def _plain_values(path: str) -> dict[str, Any]:
    """Loads a checkpoint without running code that it may contain."""
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise LedgerError(
            f"`{path}` in `previous_checkpoints` holds more than plain values, and loading it could run code: {error}"
            " If you trust the file, allow its classes with `torch.serialization.add_safe_globals` first."
        ) from error
    return checkpoint
