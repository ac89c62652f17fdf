"""Reads the graph of a loss: which trained parameters it reaches, and past which layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor

_REENTRANT = "CheckpointFunctionBackward"
Node = Any  # of autograd; torch has no public type for those made in C++


class Passage(NamedTuple):
    """One forward pass of a layer in the graph.

    Attributes:
        output: The node of its output.
        sources: The nodes of its inputs.
        own: Ids of the parameters whose use inside it is known.
        is_leaf: Whether everything between output and sources is the layer's own, so that it need not be looked at.
    """

    output: Node
    sources: tuple[Node, ...]
    own: frozenset[int]
    is_leaf: bool


class Survey(NamedTuple):
    """What :func:`survey` found.

    Attributes:
        uncovered: Ids of the trained parameters that the loss reaches past all passages.
        lowest: Indices of the passages below which there is no other one.
        reached: Indices of all passages that the loss depends on.
        is_reentrant: Whether a checkpoint hides a part of the graph until the backward pass.
    """

    uncovered: set[int]
    lowest: list[int]
    reached: list[int]
    is_reentrant: bool


def survey(loss: Tensor, passages: Collection[Passage], trained: Iterable[int]) -> Survey:
    """Walks from the loss to the leaves, around what happens inside of layers.

    Args:
        loss: What the backward pass starts from.
        passages: The forward passes of layers that are watched.
        trained: Ids of the trained parameters.
    """
    trained = set(trained)
    indices: dict[Node, list[int]] = {}
    for index, passage in enumerate(passages):
        indices.setdefault(passage.output, []).append(index)
    passages = list(passages)
    inside = _inside(passages)
    uncovered: set[int] = set()
    reaches: dict[Node, bool] = {}  # whether a passage begins at the node or below it; holds the nodes, too
    lowest: list[int] = []
    is_reentrant = False
    stack: list[tuple[Node, list[Node] | None]] = [(loss.grad_fn, None)]
    while stack:
        node, below = stack.pop()
        if below is None:
            if node is None or node in reaches:
                continue
            reaches[node] = False
            is_reentrant = is_reentrant or _REENTRANT in type(node).__name__
            below = _below(node, [passages[i] for i in indices.get(node, ())])
            for child in below:
                used = id(getattr(child, "variable", None))
                # PRIVACY: a use that no watched forward explains has no per-record gradient, so nothing bounds it.
                if used in trained and used not in inside.get(node, ()):
                    uncovered.add(used)
            stack.append((node, below))
            stack.extend((child, None) for child in below)
            continue
        deeper = any(reaches[child] for child in below)
        here = indices.get(node, ())
        if here and not deeper:
            lowest.extend(here)
        reaches[node] = deeper or bool(here)
    reached = [index for node in reaches for index in indices.get(node, ())]
    return Survey(uncovered, lowest, reached, is_reentrant)


def _below(node: Node, passages: list[Passage]) -> list[Node]:
    """What a node depends on; only the sources where it is the output of a leaf layer."""
    if any(passage.is_leaf for passage in passages):
        return [source for passage in passages if passage.is_leaf for source in passage.sources]
    return [child for child, _ in node.next_functions if child is not None]


def _inside(passages: list[Passage]) -> dict[Node, set[int]]:
    """Nodes between output and sources of layers that are no leaves, with the parameters that may be used there."""
    found: dict[Node, set[int]] = {}
    for passage in passages:
        if passage.is_leaf:
            continue
        seen = set(passage.sources)
        stack = [passage.output]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                found.setdefault(node, set()).update(passage.own)
                stack.extend(child for child, _ in node.next_functions if child is not None)
    return found
