"""Compute symbolic sizes from a call's own arguments.

Export computes each size once per program, so modules seem to read each other's values. A call
with a signature reads sizes from its arguments if one has that size; other sizes are extra inputs.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.torch_base import SYMBOLS, OpOverload, add_node, expression_of, varies
from lowerdeck.unflatten.cut.signatures import flat_call
from lowerdeck.unflatten.cut.working_graph import Leaf, WorkingGraph
from lowerdeck.unflatten.trace.calls import Frame

_SIZE = torch.ops.aten.sym_size.int


def localize_sizes(working: WorkingGraph) -> None:
    """Make calls with a signature compute symbolic sizes from their own arguments.

    Args:
        working: The working graph; changed.
    """
    nodes = working.graph.nodes if working.preserved else ()
    symbolic = [node for node in nodes if is_symbolic(node)]
    if not symbolic:
        return
    sizes = _Sizes(working)
    sizes.move_to_owners()
    # Outer calls first: inner calls use their leaves.
    for frame in working.tree.frames():
        call = working.preserved.get(frame)
        if call is not None and frame.parent is not None:
            inputs = tuple([sizes.leaf(leaf, frame.parent) for leaf in call.inputs])
            working.preserved[frame] = replace(call, inputs=inputs)
    # Backwards, so that sizes used only by erased sizes are erased too.
    for node in reversed(symbolic):
        for user in list(node.users):
            local = sizes.local(node, sizes.frame_of.get(user, working.tree.root))
            if local is not None and local is not node and local < user:
                user.replace_input_with(node, local)
    for frame, call in list(working.preserved.items()):
        outputs = tuple([sizes.leaf(leaf, frame) for leaf in call.outputs])
        working.preserved[frame] = replace(call, outputs=outputs)
    sizes.erase_unread()
    for frame, call in list(working.preserved.items()):
        if call.signature.is_flat:
            working.preserved[frame] = flat_call(frame)


def is_symbolic(node: Node) -> bool:
    """Return whether ``node`` is a symbolic number."""
    value = node.meta.get("val")
    return isinstance(value, SYMBOLS) and varies(value)


class _Sizes:
    """Adds size nodes, each once per call."""

    def __init__(self, working: WorkingGraph) -> None:
        self.working = working
        self.graph = working.graph
        self.frame_of = working.tree.node_frames()
        self._local: dict[tuple[Frame, object], Node | None] = {}
        self._available: dict[Frame, dict[Any, tuple[Node, int | None]]] = {}

    def move_to_owners(self) -> None:
        """Move size reads out of calls with a signature if the tensor is not an argument."""
        for node in list(self.graph.find_nodes(op="call_function", target=_SIZE)):
            frame, source = self.frame_of[node], node.args[0]
            owner = self.frame_of.get(source, self.working.tree.root)
            if any(
                call in self.working.preserved
                and source not in self.working.preserved[call].inputs
                for call in frame.around(frame.common(owner))
            ):
                frame.nodes.remove(node)
                insort(owner.nodes, node)
                self.frame_of[node] = owner

    def leaf(self, leaf: Leaf, reader: Frame) -> Leaf:
        """Return the node for a signature leaf in ``reader``."""
        if not isinstance(leaf, Node) or leaf not in self.frame_of or not is_symbolic(leaf):
            return leaf
        return self.local(leaf, reader) or leaf

    def local(self, node: Node, reader: Frame) -> Node | None:
        """Return a node for a size in ``reader``, or None to keep ``node``."""
        inner = self.frame_of.get(node, self.working.tree.root)
        common = inner.common(reader)
        for frame in reader.around(common):
            call = self.working.preserved.get(frame)
            if call is None:
                continue
            if node in call.inputs:
                return node
            if (local := self._in(node, frame)) is not None:
                return local
        left = [frame for frame in inner.around(common) if frame in self.working.preserved]
        if not left or any(node in self.working.preserved[frame].outputs for frame in left):
            return None
        while common.parent is not None and common not in self.working.preserved:
            common = common.parent
        return self._in(node, common) or self._of_result(node, left[-1])

    def _in(self, node: Node, frame: Frame) -> Node | None:
        """Return ``node`` recomputed from the arguments of ``frame``, or None."""
        value = node.meta["val"] if is_symbolic(node) else None
        if value is None:
            return None
        key = (frame, expression_of(value) if isinstance(value, torch.SymInt) else node)
        if key in self._local:
            return self._local[key]
        local: Node | None = None
        source = self._sizes_of(frame).get(key[1])
        if source is not None:
            tensor, dim = source
            local = tensor
            if dim is not None:
                local = self._add(frame, _SIZE, (tensor, dim), f"{tensor.name}_size", value)
        elif node.op == "call_function" and node.target is not _SIZE and not node.kwargs:
            parts = [self._in(arg, frame) if isinstance(arg, Node) else arg for arg in node.args]
            if None not in parts:
                local = self._add(frame, node.target, tuple(parts), node.name, value)
        self._local[key] = local
        return local

    def _sizes_of(self, frame: Frame) -> dict[Any, tuple[Node, int | None]]:
        """Return the tensor and dimension of each symbolic size in the arguments of ``frame``."""
        known = self._available.get(frame)
        if known is None:
            known = self._available[frame] = {}
            call = self.working.preserved.get(frame)
            arguments = (
                call.nodes(call.inputs)
                if call is not None
                else self.graph.find_nodes(op="placeholder")
            )
            for argument in arguments:
                value = argument.meta.get("val")
                if isinstance(value, torch.SymInt) and varies(value):
                    known.setdefault(expression_of(value), (argument, None))
                for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    if varies(size):
                        known.setdefault(expression_of(size), (argument, dim))
        return known

    def _of_result(self, node: Node, frame: Frame) -> Node | None:
        """Return the size as read by the caller from a result of ``frame``, or None."""
        caller, text = frame.parent, str(node.meta["val"])
        call = self.working.preserved[frame]
        for leaf in call.nodes(call.outputs):
            value = leaf.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if str(size) == text and caller is not None:
                    key = (frame, (leaf, dim))
                    if key not in self._local:
                        with self.graph.inserting_after(max(frame.all_nodes())):
                            self._local[key] = self._insert(
                                caller, _SIZE, key[1], f"{leaf.name}_size", size
                            )
                    return self._local[key]
        return None

    def _add(
        self, frame: Frame, target: Any, args: tuple[Any, ...], name: str, value: Any
    ) -> Node:
        """Add a node to ``frame``, at its start or after its last argument."""
        last = max((arg for arg in args if isinstance(arg, Node)), default=None)
        first = frame.first_node()
        if frame.parent is None:
            first = next(node for node in self.graph.nodes if node.op != "placeholder")
        if last is not None and (first is None or not last < first):
            where = self.graph.inserting_after(last)
        else:
            where = self.graph.inserting_before(first)
        with where:
            return self._insert(frame, target, args, name, value)

    def _insert(
        self, frame: Frame, target: Any, args: tuple[Any, ...], name: str, value: Any
    ) -> Node:
        node = add_node(self.graph, "call_function", target, args, name)
        node.meta["val"] = value
        insort(frame.nodes, node)
        self.frame_of[node] = frame
        return node

    def erase_unread(self) -> None:
        """Erase unused sizes, except a call's only node."""
        leaves = {
            leaf
            for call in self.working.preserved.values()
            for leaf in (*call.inputs, *call.outputs)
            if isinstance(leaf, Node)
        }
        for node in reversed(list(self.graph.nodes)):
            if node.users or node in leaves or node not in self.frame_of:
                continue
            is_other = isinstance(node.target, OpOverload) and node.target is not _SIZE
            if is_other or not is_symbolic(node):
                continue
            frame = self.frame_of[node]
            if len(frame.nodes) > 1:
                frame.nodes.remove(node)
                self.graph.erase_node(node)
