"""Copy of a program's flat graph, prepared for cutting into module calls.

State placeholders become attribute reads in the call whose module owns the state. Regions that run
under another mode are inlined between nodes that switch the mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import add_node, copy_node, returns_written
from lowerdeck.unflatten._torch_private import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GRAD_MODE_REGION,
    SET_GRAD_MODE,
    TRACEPOINT,
)
from lowerdeck.unflatten.call_signature import CallSignature
from lowerdeck.unflatten.trace import Trace
from lowerdeck.unflatten.trace.calls import CallTree, Frame
from lowerdeck.unflatten.trace.mutations import Mutation
from lowerdeck.unflatten.trace.program import Item, Role, Scope, region_arguments, unpacks_region

_ALIAS = torch.ops.aten.alias.default
_DETACH = torch.ops.aten.detach.default


@dataclass(frozen=True, slots=True)
class Absent:
    """Unused argument or result that the program dropped."""


Leaf = Node | Absent | None | bool | int | float | str
"""An argument or result: a node of the working graph, or a constant."""


@dataclass(frozen=True, slots=True)
class PreservedCall:
    """One call with a signature.

    Attributes:
        inputs: Leaves of the arguments.
        outputs: Leaves of the result.
    """

    signature: CallSignature
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]

    def nodes(self, leaves: Sequence[Leaf]) -> list[Node]:
        """Return the distinct nodes among ``leaves``."""
        return list(dict.fromkeys([leaf for leaf in leaves if isinstance(leaf, Node)]))


@dataclass(slots=True)
class WorkingGraph:
    """Working copy of a program's graph.

    Attributes:
        graph: Placeholders are the user inputs, in order; the output is a flat tuple.
        tree: The calls and their nodes.
        inputs: The placeholder of each user input.
        preserved: The calls with a signature.
        attributes: Subgraphs by ``get_attr`` target.
        reads: Name of the state placeholder for each ``get_attr`` node that reads state.
        refusals: Why modules cannot be replaced or hooked.
    """

    graph: Graph
    tree: CallTree
    inputs: list[Node] = field(default_factory=list)
    preserved: dict[Frame, PreservedCall] = field(default_factory=dict)
    attributes: dict[str, torch.nn.Module] = field(default_factory=dict)
    reads: dict[Node, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateRead:
    """State placeholder whose reading call is not known yet."""

    placeholder: str


class ProgramCopier:
    """Copies a program node by node into a working graph.

    Args:
        trace: The program, which is not changed, and its call tree, which gets the new nodes.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.graph: Graph = Graph()
        refusals = dict(trace.tree.refusals)
        self.working: WorkingGraph = WorkingGraph(self.graph, trace.tree, refusals=refusals)
        self.values: dict[Node, Any] = {}
        self._reads: dict[tuple[Frame, str], Node] = {}
        self._clones: dict[Node, Node] = {}
        self._opened: list[Node] = []
        self._examples: dict[str, Any] = {}

    def copy(self) -> WorkingGraph:
        """Return the copy without its output."""
        self._copy_placeholders()
        self._write_back(-1)
        for position, item in enumerate(self.trace.items):
            match item.role:
                case Role.COMPUTE:
                    self._copy_node(item)
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
            if self.trace.mutations.after:
                self._write_back(position)
        return self.working

    def copy_output(self) -> None:
        """Add the output, once the preserved calls are known."""
        trace, root = self.trace, self.trace.tree.root
        output = next(iter(trace.program.graph.find_nodes(op="output")))
        mutations = trace.mutations

        def value(item: Any) -> Any:
            if not isinstance(item, Node):
                return item
            if item in self._clones:
                return self._clones[item]
            return self.resolve(self.values[item], root)

        values = tuple(output.args[0])[mutations.count :]
        if not mutations.inplace:
            self._protect_outputs()
            values = (*(mutation.value for mutation in mutations.all), *values)
        copied = self.graph.output(tuple(map_aggregate(item, value) for item in values))
        copied.meta.update(output.meta)

    def _copy_placeholders(self) -> None:
        targets = self.trace.state.targets
        for node in self.trace.program.graph.find_nodes(op="placeholder"):
            if node.name in targets:
                self.values[node] = StateRead(node.name)
                self._examples[node.name] = node.meta.get("val")
                continue
            self.values[node] = copy_node(self.graph, node, {})
            self.working.inputs.append(self.values[node])

    def _copy_node(self, item: Item) -> None:
        node, frame, values = item.node, self.trace.tree.frame_of[item], self.values
        if node.op == "get_attr":
            values[node] = self._read_attribute(node, item.scope, frame)
            return
        if node.target is TRACEPOINT:
            for user in node.users:
                leaf = node.args[user.args[1]]  # type: ignore[index]
                values[user] = values[leaf] if isinstance(leaf, Node) else leaf
            return
        if unpacks_region(node):
            return
        reads_state = False
        env: dict[Node, Any] = {}
        for source in node.all_input_nodes:
            value = env[source] = values[source]
            if type(value) is not Node:
                env[source] = self.resolve(value, frame)
                reads_state = True
        copied = copy_node(self.graph, node, env)
        if node.target is _ALIAS and str(node.meta.get("original_aten")) == _DETACH_NAME:
            # Decomposition turns detach into alias, which propagates gradients.
            copied.target = _DETACH
        frame.nodes.append(copied)
        values[node] = copied
        if reads_state and returns_written(node.target):
            # An in-place write updates the state itself; later calls read it by attribute.
            first = values.get(node.args[0]) if isinstance(node.args[0], Node) else None
            values[node] = first if isinstance(first, StateRead) else copied

    def _enter(self, item: Item) -> None:
        if item.inner is None:
            return
        operands = region_arguments(item.node)[2]
        placeholders = item.inner.module.graph.find_nodes(op="placeholder")
        for placeholder, operand in zip(placeholders, operands, strict=True):
            is_node = isinstance(operand, Node)
            self.values[placeholder] = self.values[operand] if is_node else operand

    def _exit(self, item: Item) -> None:
        if item.inner is None:
            return
        output: Any = next(iter(item.inner.module.graph.find_nodes(op="output"))).args[0]
        parts = output if isinstance(output, (tuple, list)) else (output,)
        results = tuple(self.values[part] if isinstance(part, Node) else part for part in parts)
        self.values[item.node] = results
        for user in item.node.users:
            if unpacks_region(user):
                self.values[user] = results[user.args[1]]  # type: ignore[index]

    def _open(self, item: Item) -> None:
        is_grad = item.node.target is GRAD_MODE_REGION
        target = SET_GRAD_MODE if is_grad else ENTER_AUTOCAST
        mode = region_arguments(item.node)[0]
        opened = add_node(self.graph, "call_function", target, mode, "enter_mode")
        opened.meta["stack_trace"] = item.node.meta.get("stack_trace")
        self.trace.tree.frame_of[item].nodes.append(opened)
        self._opened.append(opened)

    def _close(self, item: Item) -> None:
        opened = self._opened.pop()
        is_grad = item.node.target is GRAD_MODE_REGION
        target = SET_GRAD_MODE if is_grad else EXIT_AUTOCAST
        args = (not item.node.args[0],) if is_grad else (opened,)
        closed = add_node(self.graph, "call_function", target, args, "exit_mode")
        closed.meta["closes"] = opened.name
        self.trace.tree.frame_of[item].nodes.append(closed)

    def _write_back(self, position: int) -> None:
        for mutation in self.trace.mutations.after.get(position, ()):
            self._write(mutation)

    def _write(self, mutation: Mutation) -> None:
        frame = mutation.frame
        self._protect_outputs()
        target = self.resolve(self.values[mutation.target], frame)
        value = self.resolve(self.values[mutation.value], frame)
        copy_ = torch.ops.aten.copy_.default
        written = add_node(self.graph, "call_function", copy_, (target, value), "copy_")
        written.meta.update(mutation.value.meta)
        frame.nodes.append(written)

    def _protect_outputs(self) -> None:
        """Copy outputs once before the first write to their memory."""
        if self._clones:
            return
        wanted = list(self.trace.mutations.returned)
        wanted += [other.value for other in self.trace.mutations.all if other.clone_value]
        for node in wanted:
            if node in self.values and node not in self._clones:
                value = self.resolve(self.values[node], self.trace.tree.root)
                self._clones[node] = self._clone(value, node)

    def _clone(self, value: Any, node: Node) -> Node:
        clone = torch.ops.aten.clone.default
        copied = add_node(self.graph, "call_function", clone, (value,), f"{node.name}_kept")
        copied.meta.update(node.meta)
        self.trace.tree.root.nodes.append(copied)
        return copied

    # Reads of state.

    def resolve(self, value: Any, frame: Frame, *, early: bool = False) -> Any:
        """Return the node or constant for a value in ``frame``.

        Args:
            early: Read state at the start of the call.
        """
        if isinstance(value, StateRead):
            return self._read(value.placeholder, frame, early=early)
        if isinstance(value, tuple):
            return tuple(self.resolve(part, frame) for part in value)
        return value

    def _read(self, placeholder: str, frame: Frame, *, early: bool) -> Node:
        """Return the state read in the innermost call around ``frame`` that owns the state."""
        key = (frame, placeholder)
        read = self._reads.get(key)
        if read is not None:
            return read
        own, prefix = self.trace.state.targets[placeholder], frame.path + "."
        owner, path = frame, own[len(prefix) :]
        if not own.startswith(prefix):
            owner, path = self._owner(placeholder, frame)
            key = (owner, placeholder)
            read = self._reads.get(key)
        if read is None:
            read = self._insert_read(owner, path, placeholder, here=owner is frame and not early)
            read.meta["val"] = self._examples[placeholder]
            self._reads[key] = read
            self.working.reads[read] = placeholder
        return read

    def _owner(self, placeholder: str, frame: Frame) -> tuple[Frame, str]:
        """Return the innermost call around ``frame`` that owns the state, and its path there."""
        names, paths = self.trace.state.names_of(placeholder), self.trace.paths
        for outer in frame.around():
            for name in names:
                path = paths.attribute(outer.path, name)
                if path is not None:
                    return outer, path
        return self.working.tree.root, names[0]

    def _insert_read(self, owner: Frame, path: str, name: str, *, here: bool) -> Node:
        # Not named after the path: resolving name collisions costs more than the node.
        first = None if here else owner.first_node()
        if first is None:
            read = add_node(self.graph, "get_attr", path, (), name)
            owner.nodes.append(read)
            return read
        with self.graph.inserting_before(first):
            read = add_node(self.graph, "get_attr", path, (), name)
        owner.nodes.insert(0, read)
        return read

    def _read_attribute(self, node: Node, scope: Scope, frame: Frame) -> Node:
        """Return a ``get_attr`` node for a subgraph such as a cond branch."""
        name = str(node.target)
        attribute: Any = scope.module
        for part in name.split("."):
            attribute = getattr(attribute, part)
        base, number = name.replace(".", "_"), 0
        attributes = self.working.attributes
        while (
            attributes.get(name, attribute) is not attribute
            or name.partition(".")[0] in self._model_names
        ):
            number += 1
            name = f"{base}_{number}"
        attributes[name] = attribute
        read = add_node(self.graph, "get_attr", name, (), node.name)
        read.meta.update(node.meta)
        frame.nodes.append(read)
        return read

    @cached_property
    def _model_names(self) -> frozenset[str]:
        """Names of all children and state of the model."""
        names = (*self.trace.paths.order, *self.trace.state.entries)
        return frozenset(part for name in names for part in name.split("."))


_DETACH_NAME = "aten.detach.default"


def attribute_modules(
    nodes: Iterable[Node], modules: dict[str, torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Return the entries of ``modules`` that ``nodes`` read."""
    if not modules:
        return {}
    names: Any = [node.target for node in nodes if node.op == "get_attr"]
    return {name: modules[name] for name in names if name in modules}
