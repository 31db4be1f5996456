"""Sizes that a preserved call computes from its own arguments, as eager's module does.

Export asks a tensor for each size once and lets the whole program read that number, so that one
module seems to need what another has computed. A call that is to stand alone asks its own
arguments instead, where these determine the size; and what comes after a call that makes a tensor
of a size that only data tell asks that tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, add_node, expression_of, schema_of, varies
from lowerdeck.unflatten.cut.preserved import Leaf
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, nodes_in
from lowerdeck.unflatten.trace.call_tree import Frame, common_ancestor, frames_around

_SIZE = torch.ops.aten.sym_size.int
ITEM = torch.ops.aten.item.default
"""Reads a number out of a tensor."""


def compute_own_sizes(made: WorkingGraph) -> None:
    """Let preserved calls, and what is outside of them, compute the sizes that others computed.

    What the arguments of a call do not determine is read as before.

    Args:
        made: The whole working graph; changed.
    """
    _move_to_their_tensors(made)
    sizes = _OwnSizes(made)
    for node, inner in list(sizes.frame_of.items()):
        if _expression(node) is None:
            continue
        for user in list(node.users):
            reader = sizes.frame_of.get(user, made.tree.root)
            own = sizes.own(node, inner, reader)
            if own is not None and own < user:
                user.replace_input_with(node, own)
    for frame, call in list(made.preserved.items()):
        caller = frame.parent if frame.parent is not None else frame
        inputs = tuple(sizes.leaf(leaf, caller) for leaf in call.inputs)
        outputs = tuple(sizes.leaf(leaf, frame) for leaf in call.outputs)
        made.preserved[frame] = replace(call, inputs=inputs, outputs=outputs)


def _move_to_their_tensors(made: WorkingGraph) -> None:
    """Let whoever has a tensor ask for its size, where a preserved call asks one it is not given.

    A pass of export's puts the question where the size is first used.
    """
    frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
    for node in made.graph.find_nodes(op="call_function", target=_SIZE):
        frame, source = frame_of[node], node.args[0]
        owner = frame_of.get(source, made.tree.root)
        entered = frames_around(frame, common_ancestor(frame, owner))
        if any(
            call in made.preserved and source not in made.preserved[call].inputs
            for call in entered
        ):
            frame.nodes.remove(node)
            owner.nodes.insert(sum(other < node for other in owner.nodes), node)


class _OwnSizes:
    """Makes nodes for sizes, each once in a call.

    Args:
        made: The working graph.
    """

    def __init__(self, made: WorkingGraph) -> None:
        self._made = made
        self.frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
        self._known: dict[tuple[Frame, str], Node | None] = {}
        self._arguments: dict[Frame, dict[str, Callable[[], Node]]] = {}

    @cached_property
    def _writes(self) -> bool:
        targets = {node.target for node in self._made.graph.nodes}
        return any(isinstance(one, OpOverload) and schema_of(one).is_mutable for one in targets)

    def leaf(self, leaf: Leaf, reader: Frame) -> Leaf:
        """Return what ``reader`` has for a leaf of a signature."""
        if not isinstance(leaf, Node) or _expression(leaf) is None or leaf not in self.frame_of:
            return leaf
        return self.own(leaf, self.frame_of[leaf], reader) or leaf

    def own(self, node: Node, inner: Frame, reader: Frame) -> Node | None:
        """Return a node that a reader outside of a call may read for a size, None for ``node``.

        Args:
            node: The size.
            inner: The call that computes it.
            reader: The call that reads it.
        """
        around = common_ancestor(inner, reader)
        left, entered = (
            [frame for frame in frames_around(start, around) if frame in self._made.preserved]
            for start in (inner, reader)
        )
        if entered:
            return None if self._is_argument(node, entered[-1]) else self._in(node, entered[0])
        if not left or any(node in self._made.preserved[frame].outputs for frame in left):
            return None
        found = self._in(node, self._standing_around(reader))
        return found or self._of_results(node, left[-1])

    def _of_results(self, node: Node, frame: Frame) -> Node | None:
        """Return the size ``node`` asked of what a call returned; None if no result has it."""
        caller, text = frame.parent, str(_expression(node))
        for leaf in self._made.preserved[frame].nodes(self._made.preserved[frame].outputs):
            value = leaf.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if str(size) == text and caller is not None:
                    return self._after(frame, caller, leaf, dim)
        return None

    def _after(self, frame: Frame, caller: Frame, leaf: Node, dim: int) -> Node:
        """Return the size of a result of ``frame``, asked by its caller once that has returned."""
        key = (frame, f"{leaf.name}.shape[{dim}]")
        known = self._known.get(key)
        if known is None:
            with self._made.graph.inserting_after(max(nodes_in(frame))):
                known = add_node(
                    self._made.graph, "call_function", _SIZE, (leaf, dim), f"{leaf.name}_size"
                )
            known.meta["val"] = leaf.meta["val"].shape[dim]
            caller.nodes.insert(sum(other < known for other in caller.nodes), known)
            self.frame_of[known] = caller
            self._known[key] = known
        return known

    def _is_argument(self, node: Node, frame: Frame) -> bool:
        return node in self._made.preserved[frame].inputs

    def _standing_around(self, frame: Frame) -> Frame:
        while frame.parent is not None and frame not in self._made.preserved:
            frame = frame.parent
        return frame

    def _in(self, node: Node, frame: Frame) -> Node | None:
        """Return the size ``node`` as ``frame`` computes it; None if its arguments do not tell."""
        expression = _expression(node)
        if expression is None:
            # A tensor: what is read out of it is no size, and is not computed again.
            return None
        text = str(expression)
        key = (frame, text)
        if key not in self._known:
            made = self._of_arguments(frame).get(text)
            found = made() if made is not None else self._read_again(node, frame)
            self._known[key] = found or self._by_parts(node, frame)
        return self._known[key]

    def _read_again(self, node: Node, frame: Frame) -> Node | None:
        """Return the number that ``node`` reads out of a tensor, read by ``frame`` itself.

        Not where anything is written: the tensor might hold another number by then.
        """
        source = node.args[0] if node.target is ITEM else None
        if not isinstance(source, Node) or self._writes:
            return None
        if source not in self._given(frame) and self.frame_of.get(source) is not frame:
            return None
        return self._add(frame, ITEM, (source,), node.name, node.meta.get("val"))

    def _by_parts(self, node: Node, frame: Frame) -> Node | None:
        if node.op != "call_function" or node.target is _SIZE or node.kwargs:
            return None
        parts = [self._in(arg, frame) if isinstance(arg, Node) else arg for arg in node.args]
        if None in parts:
            return None
        return self._add(frame, node.target, tuple(parts), node.name, node.meta.get("val"))

    def _of_arguments(self, frame: Frame) -> dict[str, Callable[[], Node]]:
        """Return how ``frame`` computes each size that its arguments determine."""
        known = self._arguments.get(frame)
        if known is None:
            known = self._arguments[frame] = {}
            for argument in self._given(frame):
                value = argument.meta.get("val")
                if isinstance(value, torch.SymInt):
                    known.setdefault(str(expression_of(value)), partial(_itself, argument))
                for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    if varies(size):
                        asked = partial(self._ask, frame, argument, dim, size)
                        known.setdefault(str(expression_of(size)), asked)
                        self._solve(frame, expression_of(size), asked, known)
        return known

    def _solve(
        self,
        frame: Frame,
        whole: Any,
        asked: Callable[[], Node],
        known: dict[str, Callable[[], Node]],
    ) -> None:
        """Note the symbol that a size such as ``4*s + 2`` determines."""
        symbol = next(iter(whole.free_symbols))
        times = whole.coeff(symbol)
        rest = whole - times * symbol
        if not (times.is_Integer and times > 0 and rest.is_Integer) or whole == symbol:
            return

        def solved() -> Node:
            less = self._add(frame, operator.sub, (asked(), int(rest)), "less", None)
            return self._add(frame, operator.floordiv, (less, int(times)), str(symbol), None)

        known.setdefault(str(symbol), solved)

    def _given(self, frame: Frame) -> list[Node]:
        call = self._made.preserved.get(frame)
        if call is not None:
            return call.nodes(call.inputs)
        return list(self._made.graph.find_nodes(op="placeholder"))

    def _ask(self, frame: Frame, argument: Node, dim: int, size: Any) -> Node:
        return self._add(frame, _SIZE, (argument, dim), f"{argument.name}_size", size)

    def _add(
        self, frame: Frame, target: Any, args: tuple[Any, ...], name: str, value: Any
    ) -> Node:
        """Add a node to ``frame``, as soon as its arguments are there."""
        given = [arg for arg in args if isinstance(arg, Node)]
        after = [node for node in nodes_in(frame) if all(arg < node for arg in given)]
        with self._made.graph.inserting_before(
            min(after, default=next(iter(self._made.graph.find_nodes(op="output"))))
        ):
            made = add_node(self._made.graph, "call_function", target, args, name)
        made.meta["val"] = value
        frame.nodes.insert(sum(node < made for node in frame.nodes), made)
        self.frame_of[made] = frame
        return made


def _itself(node: Node) -> Node:
    return node


def _expression(node: Node) -> Any:
    """Return the expression of a size that varies; None for any other value."""
    value = node.meta.get("val")
    return expression_of(value) if isinstance(value, torch.SymInt) and varies(value) else None
