"""Steps and state of a program.

Export wraps no_grad and autocast regions in a higher-order operator with a subgraph. Modules
called there belong to the hierarchy, so the subgraph is flattened to steps between an enter and an
exit step. Parameters, buffers and constants are shared copy-on-write with the program.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from lowerdeck.torch_base import OwnCopies, storage_identity
from lowerdeck.unflatten._torch_private import AUTOCAST_REGION, GRAD_MODE_REGION, TRACEPOINT

MODE_REGIONS = {AUTOCAST_REGION: 4, GRAD_MODE_REGION: 1}
"""Number of mode arguments of each mode operator."""

_DTYPE_CHECK = torch.ops.aten._assert_tensor_metadata.default


class Role(Enum):
    """Kind of a step.

    A region starts with ENTER and ends with EXIT; where it is split, PAUSE and RESUME exit and
    enter its mode. PASS_IN and PASS_OUT are borders without a change of mode.
    """

    COMPUTE = "compute"
    ENTER = "enter"
    PAUSE = "pause"
    RESUME = "resume"
    EXIT = "exit"
    PASS_IN = "pass in"
    PASS_OUT = "pass out"


@dataclass(slots=True, eq=False)
class Scope:
    """Graph of the program's root or of a region.

    Attributes:
        items: The item of each node.
        computes: Whether the graph or a nested region has a computing step.
    """

    module: GraphModule
    items: dict[Node, Item] = field(default_factory=dict)
    computes: bool = False


@dataclass(slots=True, eq=False)
class Item:
    """One step of the program.

    Attributes:
        node: The node; at the start and end of a region, the region's operator.
        scope: The graph of the node.
        role: The kind of step.
        inner: At the start and end of a region, the region's graph.
    """

    node: Node
    scope: Scope
    role: Role = Role.COMPUTE
    inner: Scope | None = None


def region_arguments(node: Node) -> tuple[tuple[Any, ...], Any, tuple[Any, ...]]:
    """Return the mode, the body and the operands of a region's operator."""
    count = MODE_REGIONS[node.target]
    return node.args[:count], node.args[count], node.args[count + 1 :]


def flatten_regions(module: GraphModule) -> Iterator[Item]:
    """Yield the steps of ``module`` in order, with mode regions flattened.

    Export's dtype assertions before conversions are dropped: eager has none, and they would fail
    under autocast and after ``module.to(dtype)``.
    """
    outermost = Scope(module)
    # Stack of iterators for nested regions.
    stack: list[tuple[Scope, Iterator[Node], Item | None]] = [
        (outermost, iter(module.graph.nodes), None)
    ]
    while stack:
        scope, nodes, border = stack[-1]
        for node in nodes:
            if node.op in {"placeholder", "output"} or node.target is _DTYPE_CHECK:
                continue
            inner = _body(node, scope)
            if inner is not None:
                enter = Item(node, scope, Role.ENTER, inner)
                yield enter
                stack.append((inner, iter(inner.module.graph.nodes), enter))
                break
            if unpacks_region(node) or _is_region_body(node):
                continue
            item = Item(node, scope)
            scope.items[node] = item
            for around, _, _ in stack:
                around.computes = True
            yield item
        else:
            stack.pop()
            if border is not None:
                yield Item(border.node, border.scope, Role.EXIT, border.inner)


def _is_region(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    # By id: hashing an operator calls Python code.
    return node.target is AUTOCAST_REGION or node.target is GRAD_MODE_REGION


def _body(node: Node, scope: Scope) -> Scope | None:
    if not _is_region(node):
        return None
    body = region_arguments(node)[1]
    if isinstance(body, Node) and body.op == "get_attr":
        body = scope.module.get_submodule(str(body.target))
    return Scope(body) if isinstance(body, GraphModule) else None


def unpacks_region(node: Node) -> bool:
    """Return whether a node unpacks a region's operator or a tracepoint."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return _is_region(source) or (isinstance(source, Node) and source.target is TRACEPOINT)


def _is_region_body(node: Node) -> bool:
    return node.op == "get_attr" and bool(node.users) and all(map(_is_region, node.users))


# State.


class StateKind(Enum):
    """Module dict that stores a value."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    TRANSIENT_BUFFER = "non-persistent buffer"
    CONSTANT = "constant"


class StateEntry(NamedTuple):
    """State under one name.

    Attributes:
        kind: Module dict that stores the value.
        identity: Equal for names of one tensor.
        value: The program's value, not a copy.
    """

    name: str
    kind: StateKind
    identity: object
    value: Any


class ProgramState:
    """State of a program, by name and by placeholder.

    Attributes:
        entries: All state names, in eager's order within each module.
        targets: State name of each placeholder name.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.entries: dict[str, StateEntry] = {}
        self._names: dict[object, list[str]] = {}
        """Names of tensors that may have several names."""
        self.targets: dict[str, str] = {}
        transient = set()
        for spec in program.graph_signature.input_specs:
            if spec.kind in _STATE_KINDS and spec.target is not None:
                self.targets[spec.arg.name] = spec.target
                if spec.kind is InputKind.BUFFER and not spec.persistent:
                    transient.add(spec.target)
        buffers = set(program.graph_signature.buffers)
        values: dict[str, tuple[StateKind, Any]] = {}
        for name, value in program.state_dict.items():
            is_parameter = isinstance(value, torch.nn.Parameter) and name not in buffers
            values[name] = (StateKind.PARAMETER if is_parameter else StateKind.BUFFER, value)
        for name, value in program.constants.items():
            if name not in values:
                kind = StateKind.TRANSIENT_BUFFER if name in transient else StateKind.CONSTANT
                values[name] = (kind, value)
        self._enter(values)
        self._order_buffers(program)
        for entry in self.entries.values() if self._names else ():
            if entry.identity in self._names:
                self._names[entry.identity].append(entry.name)

    def _enter(self, values: Mapping[str, tuple[StateKind, Any]]) -> None:
        memories = {name: _memory(value) for name, (_, value) in values.items()}
        readers = Counter(memories.values())
        for name, (kind, value) in values.items():
            memory = memories[name]
            # Memory identifies a tensor that does not share it.
            identity: object = memory
            if memory is None or readers[memory] > 1:
                identity = tensor_identity(value)
                self._names[identity] = []
            self.entries[name] = StateEntry(name, kind, identity, value)

    def _order_buffers(self, program: ExportedProgram) -> None:
        """Sort buffers in eager's order if recorded.

        Non-strict export lifts all buffers in eager's order. Strict export lifts only buffers that
        it reads, in read order.
        """
        buffers = [name for name, entry in self.entries.items() if entry.kind in _BUFFERS]
        if not buffers:
            return
        order = [name for name in program.graph_signature.buffers if name in self.entries]
        saved = program.state_dict
        # The state dict may order modules differently.
        in_state_dict, in_signature = (
            sorted((name for name in names if name in saved), key=lambda x: x.rpartition(".")[0])
            for names in (buffers, order)
        )
        if len(order) != len(buffers) or in_state_dict != in_signature:
            return
        for name in order:
            self.entries[name] = self.entries.pop(name)

    def names_of(self, placeholder: str) -> list[str]:
        """Return all names of a placeholder's state, its own name first."""
        return self.aliases(self.targets[placeholder])

    def aliases(self, target: str) -> list[str]:
        """Return all names of the tensor ``target``, ``target`` first."""
        entry = self.entries.get(target)
        if entry is None:
            return [target]
        return [target, *(name for name in self._names.get(entry.identity, ()) if name != target)]

    def has_aliases(self) -> bool:
        """Return whether any tensor has several names."""
        return any(len(names) > 1 for names in self._names.values())

    def copies(self) -> Iterator[tuple[StateEntry, Any]]:
        """Yield each entry with a copy-on-write value; names of one tensor share one object."""
        copies = OwnCopies(entry.value for entry in self.entries.values())
        by_identity: dict[object, Any] = {}
        for entry in self.entries.values():
            if entry.identity not in by_identity:
                by_identity[entry.identity] = copies.of(entry.value)
            yield entry, by_identity[entry.identity]


# Tuples: hashing an enum calls Python code.
_BUFFERS = (StateKind.BUFFER, StateKind.TRANSIENT_BUFFER)
_STATE_KINDS = (
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
    InputKind.CUSTOM_OBJ,
)


def tensor_identity(value: Any) -> object:
    """Return a key, equal for views with the same memory and layout.

    Loading creates two objects for one tensor saved under two names.
    """
    memory = _memory(value)
    if memory is None:
        return id(value)
    return (
        memory,
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.is_conj(),
        value.is_neg(),
        value.requires_grad,
        isinstance(value, torch.nn.Parameter),
        # Empty tensors share a null pointer, not memory.
        id(value) if not value.numel() else None,
    )


def _memory(value: Any) -> int | None:
    """Return a key of a plain tensor's storage, or None for other values."""
    if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_quantized:
        return None
    try:
        return storage_identity(value)
    except NotImplementedError:
        return None


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
