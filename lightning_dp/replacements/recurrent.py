"""Recurrent layers with one module for each product, so that every record's gradient can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_dp.replacements.product import product

State = tuple[Tensor, ...]  # of one direction of one layer: hidden, and for an LSTM cell, ``(records, size)`` each


class SeparableRecurrence(nn.Module):
    """Computes what a ``torch.nn.LSTM``, ``GRU`` or ``RNN`` computes, step by step, and is saved as one.

    Args:
        original: Whose settings and weights it takes over.
    """

    def __init__(self, original: nn.RNNBase) -> None:
        super().__init__()
        self.mode = original.mode
        self.input_size, self.hidden_size, self.proj_size = (
            original.input_size,
            original.hidden_size,
            original.proj_size,
        )
        self.num_layers, self.bidirectional = original.num_layers, original.bidirectional
        self.bias, self.batch_first, self.dropout = original.bias, original.batch_first, original.dropout
        own = dict(original.named_parameters())
        for suffix in self._suffixes():
            for part in ("ih", "hh", "hr"):
                name = f"{part}_{suffix}"
                if f"weight_{name}" in own:
                    self.add_module(name, product(own[f"weight_{name}"], own.get(f"bias_{name}")))
        self.register_state_dict_post_hook(_save_as_original)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_as_original)  # type: ignore[no-untyped-call]

    def _suffixes(self) -> Iterator[str]:
        for layer in range(self.num_layers):
            yield f"l{layer}"
            if self.bidirectional:
                yield f"l{layer}_reverse"

    def flatten_parameters(self) -> None:
        """Does nothing; there is no fused kernel to lay memory out for."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """As the original's."""
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
            output, states = self._run(x, hx, torch.arange(x.shape[1])[None] < lengths[:, None])
            packed = pack_padded_sequence(output, lengths, batch_first=True, enforce_sorted=False)
            return packed, states
        is_batched = input.dim() == 3
        if not is_batched:
            input = input.unsqueeze(0 if self.batch_first else 1)
            hx = _each(hx, lambda state: state.unsqueeze(1))
        x = input if self.batch_first else input.transpose(0, 1)
        output, states = self._run(x, hx, None)
        output = output if self.batch_first else output.transpose(0, 1)
        if not is_batched:
            return output.squeeze(0 if self.batch_first else 1), _each(states, lambda state: state.squeeze(1))
        return output, states

    def _run(self, x: Tensor, hx: Any, there: Tensor | None) -> tuple[Tensor, Any]:
        """All layers.

        Args:
            x: Inputs, ``(records, positions, input_size)``.
            hx: First states as the original takes them; zeros if None.
            there: Which positions of each record are no padding, ``(records, positions)``; all if None.
        """
        firsts, lasts, there = self._first_states(x, hx), [], None if there is None else there.to(x.device)
        directions = 2 if self.bidirectional else 1
        suffixes = list(self._suffixes())
        for layer in range(self.num_layers):
            outputs = []
            for place in range(directions * layer, directions * (layer + 1)):
                output, last = self._one(x, firsts[place], suffixes[place], there)
                outputs.append(output)
                lasts.append(last)
            x = torch.cat(outputs, 2) if directions > 1 else outputs[0]
            if layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        states = tuple(torch.stack(parts) for parts in zip(*lasts, strict=True))
        return x, states if self.mode == "LSTM" else states[0]

    def _first_states(self, x: Tensor, hx: Any) -> list[State]:
        count = self.num_layers * (2 if self.bidirectional else 1)
        if hx is None:
            hidden = x.new_zeros(len(x), self.proj_size or self.hidden_size)
            return [(hidden, x.new_zeros(len(x), self.hidden_size)) if self.mode == "LSTM" else (hidden,)] * count
        return list(zip(*hx, strict=True)) if self.mode == "LSTM" else [(hidden,) for hidden in hx]

    def _one(self, x: Tensor, state: State, suffix: str, there: Tensor | None) -> tuple[Tensor, State]:
        """One direction of one layer."""
        from_input = self.get_submodule(f"ih_{suffix}")(x)
        outputs: list[Tensor] = []
        positions = range(x.shape[1])
        for t in reversed(positions) if suffix.endswith("_reverse") else positions:
            after = self._cell(from_input[:, t], state, suffix)
            if there is not None:
                after = tuple(torch.where(there[:, t, None], new, old) for new, old in zip(after, state, strict=True))
            state = after
            outputs.append(state[0])
        if suffix.endswith("_reverse"):
            outputs.reverse()
        return torch.stack(outputs, 1), state

    def _cell(self, from_input: Tensor, state: State, suffix: str) -> State:
        """One step: what comes from the input, ``(records, gates * hidden_size)``, and the state before it."""
        hidden = state[0]
        from_hidden = self.get_submodule(f"hh_{suffix}")(hidden)
        if self.mode == "GRU":
            reset_x, update_x, new_x = from_input.chunk(3, 1)
            reset_h, update_h, new_h = from_hidden.chunk(3, 1)
            update = torch.sigmoid(update_x + update_h)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            return (new + update * (hidden - new),)
        if self.mode == "LSTM":
            enter, forget, new, leave = (from_input + from_hidden).chunk(4, 1)
            cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
            return self.get_submodule(f"hr_{suffix}")(hidden) if self.proj_size else hidden, cell
        return (torch.tanh(from_input + from_hidden) if self.mode == "RNN_TANH" else F.relu(from_input + from_hidden),)


def _each(hx: Any, change: Any) -> Any:
    if hx is None or isinstance(hx, Tensor):
        return None if hx is None else change(hx)
    return tuple(change(state) for state in hx)


def _save_as_original(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, _child in module.named_children():
        for leaf in ("weight", "bias"):
            if f"{prefix}{name}.{leaf}" in state:
                state[f"{prefix}{leaf}_{name}"] = state.pop(f"{prefix}{name}.{leaf}")


def _load_as_original(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, _child in module.named_children():
        for leaf in ("weight", "bias"):
            if f"{prefix}{leaf}_{name}" in state:
                state[f"{prefix}{name}.{leaf}"] = state.pop(f"{prefix}{leaf}_{name}")
