"""Sizes that a preserved call computes from its own arguments, as eager's module does.

Export asks a tensor for each size once and lets the whole program read that number, so that one
module seems to need what another has computed. A call that is to stand alone asks its own
arguments instead, where these determine the size; and what comes after a call that makes a tensor
of a size that only data tell asks that tensor. What a call reads of the sizes around it all the
same, it compares with those of its arguments.
"""

from __future__ import annotations

import operator
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any, cast

import torch
from torch.fx import Node

from lowerdeck.torch_base import (
    SYMBOLS,
    OpOverload,
    add_node,
    expression_of,
    schema_of,
    varies,
)
from lowerdeck.unflatten.calls.recorded_calls import path_of_leaf
from lowerdeck.unflatten.cut.flat_calls import with_other_values
from lowerdeck.unflatten.cut.preserved import Leaf, PreservedCall
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, first_node, nodes_in
from lowerdeck.unflatten.sizes.checks import must_be_sizes
from lowerdeck.unflatten.sizes.solving import SizeSolver, is_taken, ordered
from lowerdeck.unflatten.trace.call_tree import Frame, common_ancestor, frames_around

_SIZE = torch.ops.aten.sym_size.int
ITEM = torch.ops.aten.item.default
"""Reads a number out of a tensor."""

Asked = Node | tuple[Node, int]
"""A number that a call is given, or a tensor and its dimension."""

_OPERATORS = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def compute_own_sizes(made: WorkingGraph) -> None:
    """Let preserved calls, and what is outside of them, compute the sizes that others computed.

    What the arguments of a call do not determine is read as before; calls of flat values take it
    too.

    Args:
        made: The whole working graph; changed.
    """
    moved = _move_to_their_tensors(made)
    sizes = _OwnSizes(made)
    # Outer ones first: what the inner ones are given is what these have.
    for frame in made.tree.frames():
        call = made.preserved.get(frame)
        if call is not None:
            caller = frame.parent if frame.parent is not None else frame
            inputs = tuple(sizes.leaf(leaf, caller) for leaf in call.inputs)
            made.preserved[frame] = replace(call, inputs=inputs)
    # First what is made of others: an argument may have that very size.
    for node in reversed([node for node in sizes.frame_of if _is_symbol(node)]):
        for user in list(node.users):
            own = sizes.own(node, sizes.frame_of.get(user, made.tree.root))
            if own is not None and own is not node and own < user:
                user.replace_input_with(node, own)
    sizes.ask_themselves(moved)
    for frame, call in list(made.preserved.items()):
        outputs = tuple(sizes.leaf(leaf, frame) for leaf in call.outputs)
        made.preserved[frame] = replace(call, outputs=outputs)
    sizes.drop_unread()
    flat = [frame for frame, call in made.preserved.items() if call.signature.flat]
    made.preserved.update((frame, with_other_values(frame)) for frame in flat)
    sizes.compare()


def _move_to_their_tensors(made: WorkingGraph) -> list[Node]:
    """Let whoever has a tensor ask for its size, where a preserved call asks one it is not given.

    A pass of export's puts the question where the size is first used.

    Returns:
        The questions that were moved.
    """
    frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
    moved: list[Node] = []
    for node in made.graph.find_nodes(op="call_function", target=_SIZE):
        frame, source = frame_of[node], node.args[0]
        owner = frame_of.get(source, made.tree.root)
        entered = frames_around(frame, common_ancestor(frame, owner))
        if any(
            call in made.preserved and source not in made.preserved[call].inputs
            for call in entered
        ):
            frame.nodes.remove(node)
            insort(owner.nodes, node)
            moved.append(node)
    return moved


class _OwnSizes:
    """Makes nodes for sizes, each once in a call.

    Args:
        made: The working graph.
    """

    def __init__(self, made: WorkingGraph) -> None:
        self._made = made
        self.frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
        self._known: dict[tuple[Frame, object], Node | None] = {}
        self._made_of: dict[tuple[Frame, SizeSolver, Any], Any] = {}
        self._arguments: dict[Frame, tuple[SizeSolver, list[Asked]]] = {}
        self._solvers: dict[tuple[Any, ...], SizeSolver] = {}
        self._added: set[Node] = set()

    @cached_property
    def _writes(self) -> bool:
        targets = {node.target for node in self._made.graph.nodes}
        return any(isinstance(one, OpOverload) and schema_of(one).is_mutable for one in targets)

    def leaf(self, leaf: Leaf, reader: Frame) -> Leaf:
        """Return what ``reader`` has for a leaf of a signature."""
        if not isinstance(leaf, Node) or _expression(leaf) is None or leaf not in self.frame_of:
            return leaf
        return self.own(leaf, reader) or leaf

    def own(self, node: Node, reader: Frame) -> Node | None:
        """Return a node that a call may read for a size, None for ``node``.

        Args:
            node: The size.
            reader: The call that reads it.
        """
        inner = self.frame_of[node]
        around = common_ancestor(inner, reader)
        for frame in frames_around(reader, around):
            call = self._made.preserved.get(frame)
            if call is None:
                continue
            if node in call.inputs:
                return node
            found = self._in(node, frame)
            if found is not None:
                return found
        left = [one for one in frames_around(inner, around) if one in self._made.preserved]
        if any(node in self._made.preserved[frame].outputs for frame in left):
            return None
        base = self._standing_around(around)
        if left:
            return self._in(node, base) or self._of_results(node, left[-1])
        return self._of_arguments(node, base) if node in self._reading_others else None

    @cached_property
    def _reading_others(self) -> set[Node]:
        """The numbers for which the innermost call around them reads something from outside."""
        found: set[Node] = set()
        root = self._made.tree.root
        for node in self._made.graph.nodes:
            if not _is_symbol(node):
                continue
            frame = self._standing_around(self.frame_of.get(node, root))
            call = self._made.preserved.get(frame)
            if call is None:
                continue
            if any(
                source in found
                or (
                    source not in call.inputs
                    and frame not in frames_around(self.frame_of.get(source, root))
                )
                for source in node.all_input_nodes
            ):
                found.add(node)
        return found

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
            insort(caller.nodes, known)
            self.frame_of[known] = caller
            self._known[key] = known
        return known

    def _standing_around(self, frame: Frame) -> Frame:
        while frame.parent is not None and frame not in self._made.preserved:
            frame = frame.parent
        return frame

    def _in(self, node: Node, frame: Frame) -> Node | None:
        """Return the number ``node`` as ``frame`` computes it; None if its arguments do not tell.

        What is read out of a tensor is no size, and is not computed again.
        """
        if not _is_symbol(node):
            return None
        key = (frame, _expression(node) or node)
        if key not in self._known:
            found = self._of_arguments(node, frame) or self._read_again(node, frame)
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

    def _of_arguments(self, node: Node, frame: Frame) -> Node | None:
        """Return the size ``node`` as it follows from those of the arguments of ``frame``."""
        expression = _expression(node)
        if expression is None:
            return None
        solver, asked = self._sizes_given(frame)
        found = solver.find(expression)
        if found is None:
            return None
        made = self._make(found, frame, solver, asked)
        if not isinstance(made, Node):
            return None
        made.meta.setdefault("val", node.meta["val"])
        return made

    def _sizes_given(self, frame: Frame) -> tuple[SizeSolver, list[Asked]]:
        """Return what solves for the sizes of the arguments of ``frame``, and which these are."""
        known = self._arguments.get(frame)
        if known is None:
            expressions: dict[Any, Asked] = {}
            for argument in self._given(frame):
                value = argument.meta.get("val")
                if isinstance(value, torch.SymInt):
                    expressions.setdefault(expression_of(value), argument)
                for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    if varies(size):
                        expressions.setdefault(expression_of(size), (argument, dim))
            known = (self.solver(expressions), list(expressions.values()))
            self._arguments[frame] = known
        return known

    def solver(self, known: Iterable[Any]) -> SizeSolver:
        """Return what solves for these expressions; many calls have the same ones."""
        key = tuple(known)
        found = self._solvers.get(key)
        if found is None:
            found = self._solvers[key] = SizeSolver(key)
        return found

    def _make(self, whole: Any, frame: Frame, solver: SizeSolver, asked: list[Asked]) -> Any:
        """Return the node of ``frame`` that computes what a solver found, or the number it is."""
        key = (frame, solver, whole)
        if key not in self._made_of:
            self._made_of[key] = self._computed(whole, frame, solver, asked)
        return self._made_of[key]

    def _computed(self, whole: Any, frame: Frame, solver: SizeSolver, asked: list[Asked]) -> Any:
        if whole.is_Integer:
            return int(whole)
        if whole in solver.places:
            size = asked[solver.places[whole]]
            return size if isinstance(size, Node) else self.ask(frame, *size)
        name = str(whole) if whole.is_Symbol else "size"

        def apply(target: Any, *args: Any) -> Any:
            return self._add(frame, target, args, name, None)

        if whole.is_Symbol:
            number, divisor = solver.steps[whole]
            parts = [self._make(part, frame, solver, asked) for part in (number, divisor)]
            return parts[0] if parts[1] == 1 else apply(operator.floordiv, *parts)
        if whole.is_Add:
            total, *rest = ordered(whole)
            made = self._make(total, frame, solver, asked)
            for part in rest:
                added = self._make(-part if is_taken(part) else part, frame, solver, asked)
                made = apply(operator.sub if is_taken(part) else operator.add, made, added)
            return made
        parts = [self._make(part, frame, solver, asked) for part in whole.args]
        if whole.is_Mul:
            return reduce(lambda one, other: apply(operator.mul, one, other), parts)
        if whole.is_Pow:
            return apply(operator.pow, *parts)
        target = _OPERATORS[type(whole).__name__]
        return reduce(lambda one, other: apply(target, one, other), parts)

    def _given(self, frame: Frame) -> list[Node]:
        call = self._made.preserved.get(frame)
        if call is not None:
            return call.nodes(call.inputs)
        return list(self._made.graph.find_nodes(op="placeholder"))

    def ask(self, frame: Frame, argument: Node, dim: int) -> Node:
        """Return the node of ``frame`` that asks a tensor for its size, made if need be."""
        key = (frame, (argument, dim))
        known = self._known.get(key)
        if known is None:
            size = argument.meta["val"].shape[dim]
            known = self._add(frame, _SIZE, (argument, dim), f"{argument.name}_size", size)
            self._known[key] = known
        return known

    def ask_themselves(self, moved: Iterable[Node]) -> None:
        """Let calls of flat values ask a tensor for a size that their other arguments do not tell.

        Args:
            moved: The questions that are asked outside of them.
        """
        for node in moved:
            for user in list(node.users):
                reader = self.frame_of.get(user, self._made.tree.root)
                around = common_ancestor(self.frame_of[node], reader)
                for frame in frames_around(reader, around):
                    call = self._made.preserved.get(frame)
                    if call is None:
                        continue
                    if call.signature.flat:
                        source: Any = node.args[0]
                        own = self.ask(frame, source, int(str(node.args[1])))
                        user.replace_input_with(node, own)
                    break

    def drop_unread(self) -> None:
        """Erase sizes that nobody reads any more, but for all that a call computes."""
        count: dict[Frame, int] = {}
        for frame in self.frame_of.values():
            for each in frames_around(frame):
                count[each] = count.get(each, 0) + 1
        named = {
            leaf
            for call in self._made.preserved.values()
            for leaf in (*call.inputs, *call.outputs)
            if isinstance(leaf, Node)
        }
        gone: dict[Frame, set[Node]] = {}
        for node in reversed(self._made.graph.nodes):
            if node not in self.frame_of or node.users or node in named:
                continue
            is_other = isinstance(node.target, OpOverload) and node.target is not _SIZE
            if is_other or not (_is_symbol(node) or node in self._added):
                continue
            around = frames_around(self.frame_of[node])
            if any(count[each] == 1 for each in around):
                continue
            for each in around:
                count[each] -= 1
            gone.setdefault(self.frame_of.pop(node), set()).add(node)
            self._made.graph.erase_node(node)
        for frame, nodes in gone.items():
            frame.nodes[:] = [node for node in frame.nodes if node not in nodes]
        erased = set().union(*gone.values())
        self._known = {key: made for key, made in self._known.items() if made not in erased}
        self._made_of = {key: made for key, made in self._made_of.items() if made not in erased}

    def compare(self) -> None:
        """Let calls that read sizes around them compare these with those of their arguments.

        Such a size does not follow the arguments, and a call's caller checks these alone. Where
        all are as they belong together when the call was recorded, it is the same.
        """
        for frame, read in self._read_in_calls().items():
            call = self._made.preserved[frame]
            given = dict(_sizes_of(call))
            # First what is handed in, with which arguments are compared, and what tells most.
            terms = {size: _expression_of(size).count_ops() for size in (*read, *given)}
            order = sorted(terms, key=lambda size: (size in given, terms[size]))
            sources: dict[Any, Asked] = {}
            checks: dict[str, tuple[Any, Any]] = {}
            for size in order:
                expression = _expression_of(size)
                solver, asked = self.solver(sources), list(sources.values())
                expected = solver.find(expression)
                if expected is None:
                    sources[expression] = size
                    continue
                told = (asked[place] for place in solver.places_in(expected))
                if size in given and any(one in read for one in told):
                    found = size if isinstance(size, Node) else self.ask(frame, *size)
                    wanted = self._make(expected, frame, solver, asked)
                    checks[given[size]] = (found, wanted)
            if checks:
                sizes, numbers = zip(*checks.values(), strict=True)
                compared = (sizes, numbers, frame.path, tuple(checks))
                self._add(frame, must_be_sizes, compared, "checked", None)

    def _read_in_calls(self) -> dict[Frame, dict[Node, None]]:
        """Return the sizes that calls read beside their arguments, by the call."""
        found: dict[Frame, dict[Node, None]] = {}
        for frame in self._made.tree.frames():
            for node in frame.nodes:
                for size in node.all_input_nodes:
                    if _expression(size) is not None:
                        self._note_read(size, frame, found)
        return found

    def _note_read(self, size: Node, reader: Frame, found: dict[Frame, dict[Node, None]]) -> None:
        around = common_ancestor(self.frame_of.get(size, self._made.tree.root), reader)
        for frame in frames_around(reader, around):
            call = self._made.preserved.get(frame)
            if call is not None and size in call.inputs:
                break
            if call is not None:
                found.setdefault(frame, {})[size] = None

    def _add(
        self, frame: Frame, target: Any, args: tuple[Any, ...], name: str, value: Any
    ) -> Node:
        """Add a node to ``frame``, as soon as its arguments are there."""
        graph = self._made.graph
        last = max(_nodes(args), default=None)
        if last is not None and self.frame_of.get(last) is frame:
            where = graph.inserting_after(last)
        else:
            first = first_node(frame)
            if first is not None and last is not None and first < last:
                first = min((node for node in nodes_in(frame) if last < node), default=None)
            output = next(iter(graph.find_nodes(op="output")))
            where = graph.inserting_before(first if first is not None else output)
        with where:
            made = add_node(graph, "call_function", target, args, name)
        if value is not None:
            made.meta["val"] = value
        self._added.add(made)
        insort(frame.nodes, made)
        self.frame_of[made] = frame
        return made


def _nodes(args: Iterable[Any]) -> Iterator[Node]:
    for arg in args:
        if isinstance(arg, Node):
            yield arg
        elif isinstance(arg, tuple):
            yield from _nodes(arg)


def _sizes_of(call: PreservedCall) -> Iterator[tuple[Asked, str]]:
    """Yield the numbers and sizes that vary among the arguments, and how a caller names each."""
    examples = [leaf.meta.get("val") if isinstance(leaf, Node) else leaf for leaf in call.inputs]
    for number, leaf in enumerate(call.inputs):
        value = examples[number]
        if not isinstance(leaf, Node) or not isinstance(value, (torch.SymInt, torch.Tensor)):
            continue
        sizes = enumerate(value.shape if isinstance(value, torch.Tensor) else ())
        dims = [dim for dim, size in sizes if varies(size)]
        if dims or _expression(leaf) is not None:
            name = path_of_leaf(call.signature, cast("Any", examples), number)
            yield from (((leaf, dim), f"{name}.shape[{dim}]") for dim in dims)
            if not dims:
                yield leaf, name


def _expression_of(size: Asked) -> Any:
    if isinstance(size, Node):
        return _expression(size)
    return expression_of(size[0].meta["val"].shape[size[1]])


def _is_symbol(node: Node) -> bool:
    """Return whether ``node`` is a number, or the answer to a question, that varies."""
    value = node.meta.get("val")
    return isinstance(value, SYMBOLS) and varies(value)


def _expression(node: Node) -> Any:
    """Return the expression of a size that varies; None for any other value."""
    value = node.meta.get("val")
    return expression_of(value) if isinstance(value, torch.SymInt) and varies(value) else None
