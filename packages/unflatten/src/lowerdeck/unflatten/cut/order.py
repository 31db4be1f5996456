"""Order between steps that no value flow enforces: writes of state, and switches of a mode."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from lowerdeck.torch_base import SYMBOLS, OpOverload, arguments_of, written_arguments
from lowerdeck.unflatten._torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.trace.calls import Frame

SWITCHES = frozenset({ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE})
"""Functions that begin or end a mode."""


def delay_sizes(working: WorkingGraph) -> None:
    """Move each symbolic size to just before its first reader, if any mode is switched.

    Export computes all sizes at the beginning, so a call would seem to span the modes that are
    switched before it. A size that a callee reads is computed before that call starts, because
    the callee may switch modes.

    Args:
        working: The working graph; the order of its nodes is changed.
    """
    if not _has_switches(working):
        return
    frames = working.tree.frames()
    frame_of = working.tree.node_frames()
    nodes = list(working.graph.nodes)
    starts: dict[Frame, Node] = {}
    for node in nodes:
        frame = None if _is_size(node) else frame_of.get(node)
        while frame is not None and frame not in starts:
            starts[frame] = node
            frame = frame.parent
    for node in reversed(nodes):
        if not node.users or not _is_size(node):
            continue
        reader = min(node.users)
        owner, inner = frame_of.get(node), frame_of.get(reader)
        if owner is not None and inner is not None and owner in inner.around()[1:]:
            start = starts.get(inner.around(owner)[-1])
            if start is not None and all(source < start for source in node.all_input_nodes):
                reader = min(reader, start)
        reader.prepend(node)
    for frame in frames:
        frame.nodes.sort()


def _is_size(node: Node) -> bool:
    """Return whether ``node`` is a symbolic size, or computed from sizes alone."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), SYMBOLS):
        return False
    if isinstance(node.target, OpOverload):
        source = node.args[0]
        # A write in place may change the shape.
        return node.target is torch.ops.aten.sym_size.int and not (
            isinstance(source, Node)
            and any(written_arguments(user.target) for user in source.users)
        )
    return getattr(node.target, "__module__", "") in {"_operator", "math", "torch"}


def write_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    """Yield pairs (before, after) whose order must stay when a call's nodes move together.

    Each call has a separate node for state that it reads, so the graph does not show that two
    nodes are one tensor. Steps inside a mode region must stay inside, steps outside must stay
    outside.

    Args:
        working: The working graph.
    """
    yield from _state_order(working)
    if _has_switches(working):
        yield from _mode_order(working)


def _state_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    if not working.reads:
        return
    targets = {node.target for node in working.graph.nodes if node.op == "call_function"}
    if not any(map(written_arguments, targets)):
        return
    written = {name for node in working.graph.nodes for name in _written(node, working)}
    last_write: dict[str, Node] = {}
    reads: dict[str, list[Node]] = {}
    for node in working.graph.nodes if written else ():
        for source in node.all_input_nodes:
            name = working.reads.get(source)
            if name not in written:
                continue
            if name in last_write:
                yield last_write[name], node
            reads.setdefault(name, []).append(node)
        for name in dict.fromkeys(_written(node, working)):
            for reader in reads.pop(name, ()):
                if reader is not node:
                    yield reader, node
            last_write[name] = node


def _written(node: Node, working: WorkingGraph) -> Iterator[str]:
    written = written_arguments(node.target)
    for name, value in arguments_of(node).items() if written else ():
        if name in written and isinstance(value, Node) and value in working.reads:
            yield working.reads[value]


def _has_switches(working: WorkingGraph) -> bool:
    find = working.graph.find_nodes
    return any(find(op="call_function", target=target, sort=False) for target in SWITCHES)


def _mode_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    switch: Node | None = None
    since: list[Node] = []
    for node in working.graph.nodes:
        if node.op in {"placeholder", "output", "get_attr"}:
            continue
        if switch is not None:
            yield switch, node
        if node.target in SWITCHES:
            yield from ((earlier, node) for earlier in since)
            switch, since = node, []
        else:
            since.append(node)
