"""A copy of a program's flat graph in the shape that can be cut into modules.

In the copy no placeholder stands for state: each call reads what its module owns by attribute.
Pieces that export had wrapped in an operator to run them without gradients or under autocast are
written out again, because the modules called in them are part of the hierarchy too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import add_node
from lowerdeck.unflatten._torch_private import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GRAD_MODE_REGION,
    SET_GRAD_MODE,
)
from lowerdeck.unflatten.calls.carrying import (
    LOST_SIGNATURE,
    UNSURE_MODE,
    must_be_generated,
)
from lowerdeck.unflatten.cut.preserved import (
    Leaf,
    PreservedCall,
    leaf_names,
    preserved_calls,
    preserved_signature,
    warn_of_lost,
)
from lowerdeck.unflatten.cut.rewritten_leaves import (
    Surroundings,
    warn_of_doubtful,
    with_current_leaves,
)
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame
from lowerdeck.unflatten.trace.flat_items import Item, Role, Scope, mode_arguments
from lowerdeck.unflatten.trace.mutations import Mutation, is_inplace
from lowerdeck.unflatten.trace.trace import Trace

_DETACH = torch.ops.aten.detach.default


@dataclass(slots=True)
class WorkingGraph:
    """The copy.

    Attributes:
        graph: Placeholders are the user's inputs, in order; the output is a flat tuple of the
            user's.
        tree: The calls, with their nodes entered.
        inputs: The program's placeholder of each user input.
        preserved: The calls whose signatures the user asked to preserve.
        attributes: Graph modules by the attribute that ``get_attr`` nodes name.
        reads: The placeholder of the state that each other ``get_attr`` node reads.
        local: Where the graph is the program's own: for the name of a module and a placeholder of
            state the attribute by which calls of that module read it.
    """

    graph: Graph
    tree: CallTree
    inputs: list[Node] = field(default_factory=list)
    preserved: dict[Frame, PreservedCall] = field(default_factory=dict)
    attributes: dict[str, torch.nn.Module] = field(default_factory=dict)
    reads: dict[Node, str] = field(default_factory=dict)
    local: Mapping[tuple[str, Node], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateRead:
    """Stands for the value of a state placeholder until it is known which call reads it."""

    placeholder: str


class WorkingGraphBuilder:
    """Copies a program node by node.

    Args:
        trace: The program; it stays as it is.
    """

    def __init__(self, trace: Trace) -> None:
        self.program = trace.program
        self.items = trace.items
        self.state = trace.state
        self.paths = trace.paths
        self.tree = trace.tree
        self.mutations = trace.mutations
        self.graph: Graph = Graph()
        self.made: WorkingGraph = WorkingGraph(self.graph, trace.tree)
        self._reads: dict[tuple[Frame, str], Node] = {}
        self._values: dict[Node, Any] = {}
        self._clones: dict[Node, Node] = {}
        self._by_name: dict[str, Any] = {}
        self._examples: dict[str, Any] = {}
        self._opened: list[Node] = []

    def build(self) -> WorkingGraph:
        """Return the copy."""
        self._copy_placeholders()
        self._write_back(-1)
        for position, item in enumerate(self.items):
            match item.role:
                case Role.ENTER:
                    self._enter(item)
                    self._open(item)
                case Role.PASS_IN:
                    self._enter(item)
                case Role.PAUSE:
                    self._close(item)
                case Role.RESUME:
                    self._open(item)
                case Role.EXIT:
                    self._close(item)
                    self._exit(item)
                case Role.PASS_OUT:
                    self._exit(item)
                case Role.COMPUTE:
                    self._copy(item, position)
            self._write_back(position)
        for frame in self.tree.frames():
            if frame in self.tree.unsure and frame.parent is not None:
                self._forbid_replacing(frame, frame.parent, UNSURE_MODE)
        self._find_preserved_calls()
        self._copy_output()
        return self.made

    def value(self, found: Any, frame: Frame) -> Any:
        """Return what a call in ``frame`` uses for a value: for state a read of the attribute."""
        if isinstance(found, StateRead):
            return self._read(found.placeholder, frame)
        if isinstance(found, tuple):
            return tuple(self.value(part, frame) for part in found)
        return found

    def _copy_placeholders(self) -> None:
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in self.state.targets:
                self._values[node] = StateRead(node.name)
                self._examples[node.name] = node.meta.get("val")
                continue
            copy = self.graph.placeholder(node.name, type_expr=node.type)
            copy.meta.update(node.meta)
            self._values[node] = copy
            self.made.inputs.append(node)

    def _resolve(self, value: Any, scope: Scope, frame: Frame, position: int) -> Any:
        def one(item: Any) -> Any:
            if not isinstance(item, Node):
                return item
            held = self.mutations.through_state.get((position, item))
            if held is not None:
                return self.value(self._values[held], frame)
            found = scope.values[item] if item in scope.values else self._values[item]
            return self.value(found, frame)

        return map_aggregate(value, one)

    def _copy(self, item: Item, position: int) -> None:
        node, scope, frame = item.node, item.scope, self.tree.frame_of[item]
        values = self._scope_values(scope)
        if node.op == "get_attr":
            values[node] = self._attribute(node, scope, frame)
            return
        target = node.target
        if target is torch.ops.aten.alias.default and _was_detach(node):
            # Decomposing makes a plain view of it, which lets gradients through.
            target = _DETACH
        args = self._resolve(node.args, scope, frame, position)
        kwargs = self._resolve(node.kwargs, scope, frame, position) if node.kwargs else {}
        copy = add_node(self.graph, node.op, target, args, node.name, kwargs)
        self._enter_node(copy, frame, node)
        first = node.args[0] if node.args and is_inplace(node.target) else None
        held = values.get(first) if isinstance(first, Node) else None
        # What is written in place is the state itself: later calls read it from there.
        values[node] = held if isinstance(held, StateRead) else copy

    def _scope_values(self, scope: Scope) -> dict[Node, Any]:
        return self._values if scope.module is self.program.graph_module else scope.values

    def _enter_node(self, copy: Node, frame: Frame, origin: Node | None) -> Node:
        if origin is not None:
            copy.meta.update(origin.meta)
        frame.nodes.append(copy)
        return copy

    @cached_property
    def _model_names(self) -> frozenset[str]:
        """Whatever the model calls a child or state anywhere: calls read those by such names."""
        names = (*self.paths.order, *self.state.entries)
        return frozenset(part for name in names for part in name.split("."))

    def _attribute(self, node: Node, scope: Scope, frame: Frame) -> Any:
        """Return a read of what the graph module itself holds, such as a branch of a cond."""
        name = str(node.target)
        held = scope.module
        for part in name.split("."):
            held = getattr(held, part)
        base, number = name.replace(".", "_"), 0
        while (
            self.made.attributes.get(name, held) is not held
            or name.partition(".")[0] in self._model_names
        ):
            number += 1
            name = f"{base}_{number}"
        self.made.attributes[name] = held
        read = self.graph.create_node("get_attr", name, (), {}, node.name)
        return self._enter_node(read, frame, node)

    def _read(self, placeholder: str, frame: Frame, *, early: bool = False) -> Node:
        """Return a read of state in the innermost call around ``frame`` whose module owns it."""
        names = self.state.names_of(placeholder)
        owner: Frame | None = frame
        path: str | None = None
        while owner is not None:
            found = (self.paths.attribute(owner.path, name) for name in names)
            path = next((text for text in found if text is not None), None)
            if path is not None:
                break
            owner = owner.parent
        if owner is None or path is None:
            owner, path = self.tree.root, names[0]
        key = (owner, placeholder)
        read = self._reads.get(key)
        if read is None:
            read = self._insert_read(owner, path, owner is frame and not early)
            self._reads[key] = read
            self.made.reads[read] = placeholder
        return read

    def _insert_read(self, owner: Frame, path: str, here: bool) -> Node:
        name = path.replace(".", "_")
        if here:
            return self._enter_node(add_node(self.graph, "get_attr", path, (), name), owner, None)
        first = _first_node(owner)
        if first is None:
            return self._enter_node(add_node(self.graph, "get_attr", path, (), name), owner, None)
        with self.graph.inserting_before(first):
            read = add_node(self.graph, "get_attr", path, (), name)
        owner.nodes.insert(0, read)
        return read

    def _enter(self, item: Item) -> None:
        if item.inner is None:
            return
        _, _, operands = mode_arguments(item.node)
        names = [node for node in item.inner.module.graph.nodes if node.op == "placeholder"]
        for name, operand in zip(names, operands, strict=True):
            found = operand
            if isinstance(operand, Node):
                found = item.scope.values.get(operand, self._values.get(operand))
            item.inner.values[name] = found

    def _open(self, item: Item) -> None:
        mode, _, _ = mode_arguments(item.node)
        is_grad = item.node.target is GRAD_MODE_REGION
        target = SET_GRAD_MODE if is_grad else ENTER_AUTOCAST
        opened = self.graph.create_node("call_function", target, mode, {}, "enter_mode")
        self._enter_node(opened, self.tree.frame_of[item], None)
        opened.meta["stack_trace"] = item.node.meta.get("stack_trace")
        self._opened.append(opened)

    def _exit(self, item: Item) -> None:
        if item.inner is None:
            return
        output = next(iter(item.inner.module.graph.find_nodes(op="output"))).args[0]
        inner = item.inner.values
        parts = output if isinstance(output, (tuple, list)) else (output,)
        results = tuple(inner[part] if isinstance(part, Node) else part for part in parts)
        values = self._scope_values(item.scope)
        values[item.node] = results
        for user in item.node.users:
            if user.target is operator.getitem:
                values[user] = results[user.args[1]]  # type: ignore[index]

    def _close(self, item: Item) -> None:
        opened = self._opened.pop()
        args: tuple[Any, ...]
        if item.node.target is GRAD_MODE_REGION:
            target, args = SET_GRAD_MODE, (not item.node.args[0],)
        else:
            target, args = EXIT_AUTOCAST, (opened,)
        closed = self.graph.create_node("call_function", target, args, {}, "exit_mode")
        closed.meta["closes"] = opened.name
        self._enter_node(closed, self.tree.frame_of[item], None)

    def _write_back(self, position: int) -> None:
        for mutation in self.mutations.after.get(position, ()):
            self._write(mutation)

    def _write(self, mutation: Mutation) -> None:
        frame = mutation.frame
        self._protect_outputs()
        target = self.value(self._values[mutation.target], frame)
        value = self.value(self._values[mutation.value], frame)
        copy = torch.ops.aten.copy_.default
        written = self.graph.create_node("call_function", copy, (target, value), {}, "copy_")
        self._enter_node(written, frame, mutation.value)

    def _protect_outputs(self) -> None:
        """Copy what is about to be overwritten but still wanted, once, before the first write."""
        if self._clones:
            return
        wanted = list(self.mutations.returned)
        wanted += [other.value for other in self.mutations.all if other.clone_value]
        for node in wanted:
            if node in self._values and node not in self._clones:
                value = self.value(self._values[node], self.tree.root)
                self._clones[node] = self._clone(value, node)

    def _clone(self, value: Any, node: Node) -> Node:
        clone = torch.ops.aten.clone.default
        kept = self.graph.create_node("call_function", clone, (value,), {}, f"{node.name}_kept")
        return self._enter_node(kept, self.tree.root, node)

    def _find_preserved_calls(self) -> None:
        signatures = preserved_calls(self.program)
        if not signatures:
            return
        self._by_name = {node.name: value for node, value in self._values.items()}
        for item in self.items:
            inner = item.inner.values.items() if item.inner is not None else ()
            for node, value in inner:
                self._by_name.setdefault(node.name, value)
        output = next(iter(self.program.graph.find_nodes(op="output")))
        returned = {self._values.get(node) for node in output.all_input_nodes}
        stored = {self._values.get(mutation.value) for mutation in self.mutations.all}
        doubtful: list[str] = []
        for frame in self.tree.frames():
            if frame.parent is None or frame.part or frame.call_name not in signatures:
                continue
            signature = signatures[frame.call_name]
            if signature is None:
                self._forbid_replacing(frame, frame.parent, LOST_SIGNATURE)
                continue
            inside = dict.fromkeys(_nodes_in(frame))
            inputs = tuple(
                None if isinstance(leaf, Node) and leaf in inside else leaf
                for leaf in self._leaves(signature.inputs, frame.parent)
            )
            outputs = tuple(self._leaves(signature.outputs, frame))
            structure = preserved_signature(frame, signature)
            call = PreservedCall(structure, inputs, outputs)
            around = Surroundings(inside, returned, stored, self.made.reads)
            self.made.preserved[frame], lost = with_current_leaves(call, around)
            doubtful.extend(frame.path for _ in lost)
        warn_of_doubtful(doubtful)
        warn_of_lost(name for name, signature in signatures.items() if signature is None)

    def _forbid_replacing(self, frame: Frame, caller: Frame, why: str) -> None:
        first = _first_node(frame)
        if first is None:
            return
        with self.graph.inserting_before(first):
            module = self.graph.get_attr(frame.accessor)
            check = self.graph.call_function(must_be_generated, (module, frame.path, why))
        index = sum(1 for node in caller.nodes if node < first)
        caller.nodes[index:index] = [module, check]

    def _leaves(self, specs: Sequence[Any], frame: Frame) -> Iterator[Leaf]:
        for name, constant in leaf_names(specs):
            found = constant if name is None else self._by_name.get(name, constant)
            if isinstance(found, StateRead):
                example = self._examples[found.placeholder]
                found = self._read(found.placeholder, frame, early=True)
                found.meta["val"] = example
            yield found

    def _copy_output(self) -> None:
        output = next(iter(self.program.graph.find_nodes(op="output")))
        root = self.tree.root

        def one(item: Any) -> Any:
            if not isinstance(item, Node):
                return item
            if item in self._clones:
                return self._clones[item]
            held = self.mutations.final.get(item)
            if held is not None and self.made.preserved:
                # The caller keeps what it is given, and the next call overwrites the state.
                return self._clone(self.value(self._values[held], root), item)
            return self.value(self._values[item], root)

        values = tuple(output.args[0])[self.mutations.count :]
        if not self.mutations.inplace:
            self._protect_outputs()
            values = (*(mutation.value for mutation in self.mutations.all), *values)
        made = self.graph.output(tuple(map_aggregate(value, one) for value in values))
        made.meta.update(output.meta)


def _was_detach(node: Node) -> bool:
    # A copy of the operator: passes copy meta deeply.
    return str(node.meta.get("original_aten")) == "aten.detach.default"


def _nodes_in(frame: Frame) -> Iterator[Node]:
    queue = [frame]
    for current in queue:
        queue.extend(current.children)
        yield from current.nodes


def _first_node(frame: Frame) -> Node | None:
    """Return the first node of ``frame`` or of a call that it makes."""
    best: Node | None = None
    queue = [frame]
    for current in queue:
        queue.extend(current.children)
        if current.nodes and (best is None or current.nodes[0] < best):
            best = current.nodes[0]
    return best


def attribute_modules(
    graph: Graph, held: Mapping[str, torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Return the entries of ``held`` that ``graph`` reads."""
    if not held:
        return {}
    return {
        str(node.target): held[str(node.target)]
        for node in graph.find_nodes(op="get_attr")
        if str(node.target) in held
    }
