"""Clipped sums from one backward pass, without the gradient of any record where a layer's structure allows it.

The backward pass computes gradients of layers' outputs only. Input and output gradient of a layer say how large each
record's gradient is and, once the factors are known, give the weighted sum in one product ("book-keeping", Bu, Wang,
Zha and Karypis, 2023). Norms are computed while the pass runs, so that little has to be kept.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_dp import _compat
from lightning_dp.errors import InvalidValueError, UnsupportedModelError
from lightning_dp.gradients.choice import GradientMemory, MethodChoice
from lightning_dp.gradients.clipping import Clipping
from lightning_dp.gradients.engine import GradientEngine, explain_inputs
from lightning_dp.gradients.flat import FlatGradient
from lightning_dp.gradients.graph import Passage, survey
from lightning_dp.gradients.layers import (
    Casting,
    LayerForward,
    LayerGradients,
    Use,
    Workspace,
    by_sampler,
    by_vectorized_backward,
    has_sampler,
    is_part,
    known_gradients,
    own_parameters,
)
from lightning_dp.gradients.precision import full_precision


@dataclass(eq=False)
class _Watched:
    """A layer with trained parameters of its own.

    Attributes:
        layer: The layer.
        path: Where it is.
        names: The name in the module of each trained parameter, by its name in the layer.
        rule: Gives the uses of its parameters.
        is_leaf: Whether nothing but the layer's own computation lies between its input and its output.
    """

    layer: nn.Module
    path: str
    names: dict[str, str]
    rule: LayerGradients
    is_leaf: bool


@dataclass(eq=False)
class _Call:
    """One forward pass of a layer."""

    watched: _Watched
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor | None
    casting: Casting
    versions: tuple[int, ...]
    rows: frozenset[int]
    passage: Passage | None
    edge: Any
    hook: Any = None
    is_reached: bool = False
    gradient_seen: bool = False


@dataclass
class _Step:
    """What one forward and backward pass left."""

    calls: list[_Call] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    waiting: dict[str, list[Use]] = field(default_factory=dict)
    started: dict[str, Use] = field(default_factory=dict)
    squares: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    is_prepared: bool = False

    def release_graph(self) -> None:
        """Lets go of the graph, whose hooks hold the step: together they would stay until garbage is collected."""
        for call in self.calls:
            call.edge = call.passage = call.hook = None


class BookKeepingEngine(GradientEngine):
    """The default engine: private gradients at nearly the price of plain ones.

    Exact for every layer: by rules for common ones, by samplers registered with Opacus, by a vectorized second backward
    pass for the rest. Uses of a parameter that no forward pass of its layer explains are refused in every step.

    Args:
        module: The module.
        memory: What may be kept for speed; see :class:`MethodChoice`.
        methods: Ways to the norms by name of the parameter; the others are timed on the first batch.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        memory: GradientMemory | int = "balanced",
        methods: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(module)
        self.choice = MethodChoice(memory, methods or {})
        self._workspace = Workspace()
        self._handles: list[RemovableHandle] = []
        self._step = _Step()
        self._lowest: list[Any] = []
        self._is_recording = False

    @property
    def is_attached(self) -> bool:
        """Whether the module is watched."""
        return bool(self._handles)

    @property
    def is_frugal(self) -> bool:
        """Whether ``memory`` is ``"low"`` or 0."""
        return self.choice.memory in ("low", 0)

    def attach(self) -> None:
        """Starts to watch every layer with a parameter that requires a gradient; see :class:`GradientEngine`."""
        super().attach()
        unknown = sorted(set(self.choice.pinned) - {name for name, _ in self.module.named_parameters()})
        if unknown:
            raise InvalidValueError(f"`gradient_methods` names `{unknown[0]}`, which is no parameter of the module.")
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for path, layer in self.module.named_modules():
            own = {leaf: names[id(p)] for leaf, p in own_parameters(layer).items() if id(p) in names}
            if own and not is_part(self.module, path):
                watched = _watch(layer, path, own)
                if not watched.is_leaf:
                    _compat.silence_vectorizing_warning()
                hook = partial(self._record, watched)
                if "torch._dynamo" in sys.modules:  # else nothing is compiled, and asking would load it, 60 MB large
                    hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
                # PRIVACY: a rule holds for what the layer itself puts out, so it comes before hooks that change that.
                self._handles.append(layer.register_forward_hook(hook, prepend=watched.is_leaf, with_kwargs=True))
        self._is_recording = True

    def detach(self) -> None:
        """Leaves the module as it was; safe to call at any time."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._is_recording = False
        self.forget()
        self._workspace.clear()
        super().detach()

    def forget(self) -> None:
        """Drops everything that the last forward and backward pass left."""
        self._step.release_graph()
        self._lowest = []
        self._step = _Step()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _record(self, watched: _Watched, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(output, Tensor):
            self.no_tensors[watched.path] = type(output).__name__
        if not self._is_recording or not isinstance(output, Tensor) or output.grad_fn is None:
            return
        # PRIVACY: layers that a checkpoint runs again in the backward pass were counted before it.
        if self._step.is_prepared:
            return
        inputs, keywords = _in_order(layer, args, kwargs)
        tensors = list(_tensors([inputs, keywords]))
        edge = get_gradient_edge(output)
        passage = Passage(
            edge.node,
            tuple(get_gradient_edge(x).node for x in tensors if x.requires_grad),
            frozenset(id(layer.get_parameter(leaf)) for leaf in watched.names),
            watched.is_leaf,
        )
        call = _Call(
            watched,
            tuple(_detached(x) for x in inputs),
            {name: _detached(x) for name, x in keywords.items()},
            # A copy, for what comes next may write into it.
            None if watched.is_leaf else output.detach().clone(),
            Casting.current(output),
            tuple(t._version for t in tensors),
            _rows_of(layer, tensors, output),
            passage,
            edge,
        )
        self._step.calls.append(call)
        call.hook = output.register_hook(partial(self._receive, self._step, call))  # type: ignore[no-untyped-call]

    def check_inputs(self, num_rows: int) -> None:
        """Checks that every layer was given one row per record; see :class:`GradientEngine`."""
        for call in self._step.calls:
            # PRIVACY: rows of a part of the batch would be booked to its first records, whoever they are.
            if call.rows - {num_rows}:
                watched = call.watched
                message = explain_inputs(watched.path, watched.layer, min(call.rows - {num_rows}), num_rows)
                raise UnsupportedModelError(message)

    # -- backward ----------------------------------------------------------------------------------------------------

    def prepare(self, loss: Tensor) -> None:
        """Checks the graph of the loss before its backward pass.

        Raises:
            UnsupportedModelError: The loss depends on a parameter outside the forward of its layer.
        """
        step = self._step
        trained = {id(parameter): name for name, parameter in self.parameters.items()}
        found = survey(loss, [call.passage for call in step.calls if call.passage is not None], trained)
        if found.is_reentrant:
            self.forget()
            raise UnsupportedModelError(
                "A part of the model is checkpointed with `use_reentrant=True`, which hides its layers until the"
                " backward pass. Call `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )
        if found.uncovered:
            name = min(trained[parameter] for parameter in found.uncovered)
            self.forget()
            raise UnsupportedModelError(self._explain(name))
        uses = Counter(name for call in step.calls for name in call.watched.names.values())
        step.shared = {name for name, count in uses.items() if count > 1}
        self._lowest = [step.calls[i].edge for i in found.lowest]
        for i in found.reached:
            step.calls[i].is_reached = True
            _run_last(step.calls[i].hook)
        step.release_graph()
        step.is_prepared = True

    def backward(self, loss: Tensor) -> None:
        """Computes gradients of outputs only: no weight gets one."""
        edges, self._lowest = self._lowest, []
        if not edges:
            if loss.grad_fn is None:
                super().backward(loss)  # says what is wrong with it
            return
        self._is_recording = False  # a checkpointed layer runs its forward pass again
        try:
            torch.autograd.grad(loss, edges, allow_unused=True)
        finally:
            self._is_recording = True
        for call in self._step.calls:
            # PRIVACY: what is missing here was computed where no hook could see it.
            if call.is_reached and not call.gradient_seen:
                raise UnsupportedModelError(
                    f"The backward pass left out `{call.watched.path}` ({type(call.watched.layer).__name__}), which the"
                    " loss depends on. Use `.detach()` where no gradient shall flow, and checkpoint layers with"
                    " `use_reentrant=False`."
                )

    def _receive(self, step: _Step, call: _Call, gradient: Tensor) -> None:
        """Called in the backward pass with the gradient of a layer's output."""
        if not step.is_prepared or step is not self._step:
            return  # a backward pass inside `training_step`
        watched = call.watched
        if call.gradient_seen:
            raise UnsupportedModelError(self._explain(next(iter(watched.names.values()))))
        call.gradient_seen = True
        tensors = list(_tensors([call.inputs, call.keywords]))
        if any(t._version != version for t, version in zip(tensors, call.versions, strict=True)):
            raise UnsupportedModelError(
                f"The input of `{watched.path}` ({type(watched.layer).__name__}) was changed in place after the layer"
                " read it, so its gradient is lost. Write `x = x + y` in place of `x += y`."
            )
        recording, self._is_recording = self._is_recording, False
        num_rows, self.num_rows = self.num_rows, None  # a rule may run the layer again on one record at a time
        try:
            with full_precision(gradient.device):
                names = frozenset(watched.names)
                passed = watched.layer, call.inputs, gradient.detach(), names, watched.path
                found = watched.rule(LayerForward(*passed, call.keywords, call.output, call.casting))
                # PRIVACY: a parameter that a rule leaves out would be missing from the norm.
                if found.keys() != names:
                    raise UnsupportedModelError(
                        f"The rule for `{watched.path}` ({type(watched.layer).__name__}) gives gradients for"
                        f" {sorted(found)}, while {sorted(names)} are trained. If a hook computes its weight from them"
                        " (the old `torch.nn.utils.spectral_norm`), use `torch.nn.utils.parametrizations`; if the rule"
                        " is your own, let it return one for each name in `forward.wanted`."
                    )
                for leaf, use in found.items():
                    self._take(step, watched.names[leaf], use)
        finally:
            self._is_recording, self.num_rows = recording, num_rows
        step.bytes += sum(x.numel() * x.element_size() for x in (*tensors, gradient))
        call.inputs, call.keywords, call.output = (), {}, None

    def _take(self, step: _Step, name: str, use: Use) -> None:
        if name in step.shared or not self.choice.knows(name, use):
            step.waiting.setdefault(name, []).append(use)
        else:
            self._start(step, name, use)

    def _start(self, step: _Step, name: str, use: Use) -> None:
        # PRIVACY: squares of two uses do not add up to the square of their sum.
        if name in step.started:
            raise UnsupportedModelError(self._explain(name))
        squares, rest = use.start(self.choice.method(name, use), self._workspace)
        step.squares.append(squares)
        step.started[name] = rest

    # -- after the backward pass -------------------------------------------------------------------------------------

    def add_clipped(self, total: FlatGradient, num_records: int, clipping: Clipping) -> Tensor:
        """Clips and adds up what the last backward pass left; see :class:`GradientEngine`."""
        step = self._finished()
        with full_precision(total.vector.device):
            self._check_records(step, num_records)
            uses = {name: uses[0].plus(uses[1:]) for name, uses in step.waiting.items()}
            self.choice.learn(uses, step.bytes)
            for name, use in uses.items():
                self._start(step, name, use)
            if not step.started:
                return torch.zeros(num_records, dtype=total.vector.dtype, device=total.vector.device)
            # The loss is a mean: a record's own gradient is as many times larger as there are records.
            squares = {name: s.to(total.vector.dtype) for name, s in zip(step.started, step.squares, strict=True)}
            norms, finite, factors = clipping.decide(squares, self.parameters, scale=num_records)
            all_finite = bool(finite.all())
            for name, use in step.started.items():
                # PRIVACY: a dropped record is zeroed before any product, for zero times infinity is not zero.
                kept = use if all_finite else use.only(finite)
                kept.add_to(total.views[name], factors[name] * num_records, self._workspace)
                total.used.add(name)
        if self.is_frugal:
            self._workspace.clear()
        return norms

    def take_rows(self, num_records: int | None = None, *, pressed: bool = False) -> dict[str, Tensor]:
        """The gradient of each record of the last backward pass; see :class:`GradientEngine`."""
        step = self._finished()
        if num_records is not None:
            self._check_records(step, num_records)
        found = {name: [use] for name, use in step.started.items()}
        for name, uses in step.waiting.items():
            found.setdefault(name, []).extend(uses)
        together = {name: uses[0].plus(uses[1:]) for name, uses in found.items()}
        rows = {name: (use.pressed() if pressed else use).rows() for name, use in together.items()}
        return {name: row * len(row) for name, row in rows.items()}

    def _check_records(self, step: _Step, num_records: int) -> None:
        for name, use in step.started.items():
            self._check_rows(name, use.records, num_records)
        for name, uses in step.waiting.items():
            for use in uses:  # each by itself, for a single row would be added to all others
                self._check_rows(name, use.records, num_records)

    def _finished(self) -> _Step:
        step = self._step
        self.forget()
        self.drop_raw()
        return step


def _watch(layer: nn.Module, path: str, names: dict[str, str]) -> _Watched:
    rule = known_gradients(layer)
    if rule is None:
        rule = by_sampler if has_sampler(layer) else by_vectorized_backward
    return _Watched(layer, path, names, rule, is_leaf=rule is not by_vectorized_backward)


def _run_last(hook: RemovableHandle) -> None:
    """Lets other hooks of the same tensor, which may change its gradient, run first."""
    hooks = hook.hooks_dict_ref()
    if hooks is not None and hook.id in hooks:
        hooks[hook.id] = hooks.pop(hook.id)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in arguments, also in lists, tuples and dictionaries of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _in_order(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments of the forward pass by position, as far as its signature goes, and the others by name."""
    if not kwargs:
        return args, {}
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _rows_of(layer: nn.Module, tensors: list[Tensor], output: Tensor) -> frozenset[int]:
    """The sizes in which records are counted; a bag of words has one row of output for many of input."""
    shown = [output] if isinstance(layer, nn.EmbeddingBag) else [*tensors[:1], output]
    return frozenset(len(x) for x in shown if x.dim() > 0)
