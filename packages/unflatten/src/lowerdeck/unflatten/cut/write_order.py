"""Pairs of steps that must keep their order though no value flows between them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from lowerdeck.torch_base import SYMBOLS, OpOverload, arguments_of, written_arguments
from lowerdeck.unflatten._torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.results import argument_of
from lowerdeck.unflatten.trace.call_tree import Frame, frames_around

SWITCHES = frozenset({ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE})
"""Functions that begin or end a mode."""


def delay_sizes(working: WorkingGraph) -> None:
    """Compute each size that varies right before it is first read, if any mode is switched.

    Export asks for all sizes at the beginning: a call would seem to go on through the modes that
    are switched before it. Sizes are the same in each. What a call inside reads, the call that
    computes it computes before that one: within, it would be between the modes that one switches.

    Args:
        working: The working graph; the order of its nodes is changed.
    """
    if not _has_switches(working):
        return
    frames = working.tree.frames()
    frame_of = {node: frame for frame in frames for node in frame.nodes}
    nodes = list(working.graph.nodes)
    starts: dict[Frame, Node] = {}
    for node in nodes:
        around = None if _is_size(node) else frame_of.get(node)
        while around is not None and around not in starts:
            starts[around] = node
            around = around.parent
    for node in reversed(nodes):
        if not node.users or not _is_size(node):
            continue
        reader = min(node.users)
        owner, inner = frame_of.get(node), frame_of.get(reader)
        if owner is not None and inner is not None and owner in frames_around(inner)[1:]:
            start = starts.get(frames_around(inner, owner)[-1])
            if start is not None and all(source < start for source in node.all_input_nodes):
                reader = min(reader, start)
        reader.prepend(node)
    for frame in frames:
        frame.nodes.sort()


def _is_size(node: Node) -> bool:
    """Return whether ``node`` is a size that varies, or is computed of sizes alone."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), SYMBOLS):
        return False
    if isinstance(node.target, OpOverload):
        return node.target is torch.ops.aten.sym_size.int and not _is_written(node.args[0])
    return getattr(node.target, "__module__", "") in {"_operator", "math", "torch"}


def _is_written(tensor: object) -> bool:
    """Return whether anything writes a tensor in place, which may give it another shape."""
    return isinstance(tensor, Node) and any(
        written_arguments(user.target) or (argument_of(user) is tensor and _is_written(user))
        for user in tensor.users
    )


def write_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    """Yield pairs (before, after) that bringing a call's nodes together must not turn around.

    Each call reads state by a node of its own, so the graph does not show that two of them name
    one tensor. Steps inside a mode region must stay inside, those outside outside.

    Args:
        working: The working graph.
    """
    yield from _state_order(working)
    if _has_switches(working) and not _is_contiguous(working):
        yield from _mode_order(working)


def _state_order(working: WorkingGraph) -> Iterator[tuple[Node, Node]]:
    if not working.reads:
        return
    written = {name for node in working.graph.nodes for name in _written(node, working)}
    if not written:
        return
    last_write: dict[str, Node] = {}
    reads: dict[str, list[Node]] = {}
    for node in working.graph.nodes:
        writes = dict.fromkeys(_written(node, working))
        for source in node.all_input_nodes:
            name = working.reads.get(source)
            if name not in written:
                continue
            if name in last_write:
                yield last_write[name], node
            reads.setdefault(name, []).append(node)
        for name in writes:
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


def _is_contiguous(working: WorkingGraph) -> bool:
    """Return whether the nodes of every call are in one piece."""
    frame_of: dict[Node, Frame] = {}
    for frame in working.tree.frames():
        frame_of.update(dict.fromkeys(frame.nodes, frame))
    left: set[Frame] = set()
    current: list[Frame] = []
    for node in working.graph.nodes:
        if node not in frame_of:
            continue
        chain = frames_around(frame_of[node])
        if not left.isdisjoint(chain):
            return False
        left.update(set(current).difference(chain))
        current = chain
    return True


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
