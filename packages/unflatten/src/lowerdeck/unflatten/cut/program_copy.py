"""Copies a program, node by node, into the graph that is cut into modules."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import add_node, returns_written
from lowerdeck.unflatten._torch_private import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GRAD_MODE_REGION,
    SET_GRAD_MODE,
    TRACEPOINT,
)
from lowerdeck.unflatten.calls.carrying import UNSURE_MODE
from lowerdeck.unflatten.cut.delegated import forbid_delegated
from lowerdeck.unflatten.cut.flat_calls import (
    flat_call,
    frames_without_signature,
    result_alone,
)
from lowerdeck.unflatten.cut.handed_through import (
    guard_written_arguments,
    note_given_back,
    read_arguments_themselves,
)
from lowerdeck.unflatten.cut.lost_calls import forbid_lost_calls
from lowerdeck.unflatten.cut.own_sizes import compute_own_sizes
from lowerdeck.unflatten.cut.preserved_frames import (
    MarkedCalls,
    find_preserved_calls,
    forbid_replacing,
)
from lowerdeck.unflatten.cut.state_reads import StateRead, StateReads
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, enter_node
from lowerdeck.unflatten.cut.write_order import delay_sizes
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame
from lowerdeck.unflatten.trace.flat_items import Item, Role, Scope, mode_arguments
from lowerdeck.unflatten.trace.mutations import Mutation, Mutations
from lowerdeck.unflatten.trace.state import ProgramState
from lowerdeck.unflatten.trace.trace import Trace

_DETACH = torch.ops.aten.detach.default


class ProgramCopier:
    """Copies a program node by node.

    Args:
        trace: The program; it stays as it is.
        preserve_all: Whether calls without a recorded signature get one of flat tensors.
    """

    def __init__(self, trace: Trace, *, preserve_all: bool = False) -> None:
        self.trace: Trace = trace
        self.preserve_all: bool = preserve_all
        self.program: ExportedProgram = trace.program
        self.items: Sequence[Item] = trace.items
        self.state: ProgramState = trace.state
        self.tree: CallTree = trace.tree
        self.mutations: Mutations = trace.mutations
        self.graph: Graph = Graph()
        self.made: WorkingGraph = WorkingGraph(self.graph, trace.tree)
        self.reads: StateReads = StateReads(trace, self.made)
        self._values: dict[Node, Any] = {}
        self._marked: MarkedCalls = {}
        self._clones: dict[Node, Node] = {}
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
                forbid_replacing(self.made, frame, frame.parent, UNSURE_MODE)
        find_preserved_calls(self.trace, self.made, self.reads, self._values, self._marked)
        forbid_lost_calls(self.trace, self.made)
        forbid_delegated(self.trace, self.made)
        self._copy_output()
        self._part_calls()
        delay_sizes(self.made)
        return self.made

    def _part_calls(self) -> None:
        """Let preserved calls depend on their arguments alone, as far as these tell."""
        guard_written_arguments(self.made)
        flat = frames_without_signature(self.made) if self.preserve_all else []
        self.made.preserved.update((frame, result_alone(frame)) for frame in flat)
        if not self.made.preserved:
            return
        read_arguments_themselves(self.made)
        self.made.preserved.update((frame, flat_call(frame)) for frame in flat)
        compute_own_sizes(self.made)
        note_given_back(self.made)

    def _copy_placeholders(self) -> None:
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in self.state.targets:
                self._values[node] = StateRead(node.name)
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
                return self.reads.value(self._values[held], frame)
            found = scope.values[item] if item in scope.values else self._values[item]
            return self.reads.value(found, frame)

        return map_aggregate(value, one)

    def _copy(self, item: Item, position: int) -> None:
        node, scope, frame = item.node, item.scope, self.tree.frame_of[item]
        values = self._scope_values(scope)
        if node.op == "get_attr":
            values[node] = self.reads.attribute(node, scope, frame)
            return
        if node.target is TRACEPOINT:
            self._pass_mark(node, scope, frame, position)
            return
        target = node.target
        if target is torch.ops.aten.alias.default and _was_detach(node):
            # Decomposing makes a plain view of it, which lets gradients through.
            target = _DETACH
        args = self._resolve(node.args, scope, frame, position)
        kwargs = self._resolve(node.kwargs, scope, frame, position) if node.kwargs else {}
        copy = add_node(self.graph, node.op, target, args, node.name, kwargs)
        enter_node(copy, frame, node)
        first = node.args[0] if node.args and returns_written(node.target) else None
        held = values.get(first) if isinstance(first, Node) else None
        # What is written in place is the state itself: later calls read it from there.
        values[node] = held if isinstance(held, StateRead) else copy

    def _pass_mark(self, node: Node, scope: Scope, frame: Frame, position: int) -> None:
        """Note what a preserved call takes or returns; whoever reads the mark reads that."""
        kind, path = str(node.kwargs["kind"]), self.trace.paths.eager(str(node.kwargs["path"]))
        values = self._scope_values(scope)
        handed = tuple(
            scope.values.get(arg, self._values.get(arg)) if isinstance(arg, Node) else arg
            for arg in node.args
        )
        for user in node.users:
            values[user] = handed[user.args[1]]  # type: ignore[index]
        called = self.tree.marked.get(node)
        if called is not None and called.path == path:
            reader = frame if kind == "module_call_inputs" else called
            leaves = self._resolve(node.args, scope, reader, position)
            self._marked.setdefault(called, {})[kind] = leaves

    def _scope_values(self, scope: Scope) -> dict[Node, Any]:
        return self._values if scope.module is self.program.graph_module else scope.values

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
        enter_node(opened, self.tree.frame_of[item])
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
        enter_node(closed, self.tree.frame_of[item])

    def _write_back(self, position: int) -> None:
        for mutation in self.mutations.after.get(position, ()):
            self._write(mutation)

    def _write(self, mutation: Mutation) -> None:
        frame = mutation.frame
        self._protect_outputs()
        target = self.reads.value(self._values[mutation.target], frame)
        value = self.reads.value(self._values[mutation.value], frame)
        copy = torch.ops.aten.copy_.default
        written = self.graph.create_node("call_function", copy, (target, value), {}, "copy_")
        enter_node(written, frame, mutation.value)

    def _protect_outputs(self) -> None:
        """Copy what is about to be overwritten but still wanted, once, before the first write."""
        if self._clones:
            return
        wanted = list(self.mutations.returned)
        wanted += [other.value for other in self.mutations.all if other.clone_value]
        for node in wanted:
            if node in self._values and node not in self._clones:
                value = self.reads.value(self._values[node], self.tree.root)
                self._clones[node] = self._clone(value, node)

    def _clone(self, value: Any, node: Node) -> Node:
        clone = torch.ops.aten.clone.default
        kept = self.graph.create_node("call_function", clone, (value,), {}, f"{node.name}_kept")
        return enter_node(kept, self.tree.root, node)

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
                return self._clone(self.reads.value(self._values[held], root), item)
            return self.reads.value(self._values[item], root)

        values = tuple(output.args[0])[self.mutations.count :]
        if not self.mutations.inplace:
            self._protect_outputs()
            values = (*(mutation.value for mutation in self.mutations.all), *values)
        made = self.graph.output(tuple(map_aggregate(value, one) for value in values))
        made.meta.update(output.meta)


def _was_detach(node: Node) -> bool:
    # A copy of the operator: passes copy meta deeply.
    return str(node.meta.get("original_aten")) == "aten.detach.default"
