"""Programs as plain data that pickles: torch traces what it loads, and fails at control flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from lowerdeck.lowered_module._executorch import edge_operator
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.edge_form import torchs_verifiers
from lowerdeck.lowered_module.program.tags import AHEAD, REJECT, REMARKS
from lowerdeck.torch_base import OpOverload, executorch_call_delegate, reserve_name

_GRAPH = "_graph_module"
_VERIFIERS = "_verifiers"
_KEPT = (AHEAD, HANDLE, REJECT, REMARKS)


@dataclass(frozen=True, slots=True)
class _NodeIndex:
    number: int


@dataclass(frozen=True, slots=True)
class _OperatorName:
    """An operator, which pickle cannot take."""

    name: str
    higher_order: bool


@dataclass(frozen=True, slots=True)
class _NodeRecord:
    op: str
    target: Any
    name: str
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _GraphRecord:
    """A graph module: its nodes in order, and what they get from it by name."""

    nodes: tuple[_NodeRecord, ...]
    members: dict[str, Any]
    meta: dict[str, Any]


def portable_state(program: ExportedProgram) -> dict[str, Any]:
    """Return what makes up a program, in a form that pickle takes.

    Of what nodes know, debug handles and what partitioners said of them are kept. One in
    ExecuTorch's Edge dialect, which pickle cannot take, is in torch's operators there.

    Args:
        program: The program.
    """
    return {
        **program.__dict__,
        _VERIFIERS: torchs_verifiers(program),
        _GRAPH: _recorded(program.graph_module),
    }


def fill(program: ExportedProgram, state: dict[str, Any]) -> None:
    """Fill an empty program with what ``portable_state`` returned of another.

    Args:
        program: The program, modified in place.
        state: What makes it up.
    """
    program.__dict__.update(state)
    program.__dict__[_GRAPH] = _made(state[_GRAPH])


def _recorded(graph_module: GraphModule) -> _GraphRecord:
    index_of = {node: number for number, node in enumerate(graph_module.graph.nodes)}

    def named(value: object) -> object:
        return _NodeIndex(index_of[value]) if isinstance(value, Node) else _named(value)

    nodes = []
    for node in graph_module.graph.nodes:
        args, kwargs = map_aggregate((node.args, node.kwargs), named)  # type: ignore[arg-type]
        meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
        target = _named(node.target)
        nodes.append(_NodeRecord(node.op, target, node.name, args, kwargs, node.type, meta))
    read = [n.target for n in graph_module.graph.nodes if n.op in {"get_attr", "call_module"}]
    names = {
        *(str(target).partition(".")[0] for target in read),
        *dict(graph_module.named_children()),
    }
    members = {name: getattr(graph_module, name) for name in sorted(names)}
    return _GraphRecord(
        tuple(nodes),
        {
            name: _recorded(member) if isinstance(member, GraphModule) else member
            for name, member in members.items()
        },
        dict(graph_module.meta),
    )


def _made(record: _GraphRecord) -> GraphModule:
    graph = Graph()
    found: list[Node] = []

    def arrived(value: object) -> object:
        return found[value.number] if isinstance(value, _NodeIndex) else _operator(value)

    for each in record.nodes:
        args, kwargs = map_aggregate((each.args, each.kwargs), arrived)  # type: ignore[arg-type]
        node = graph.create_node(
            each.op, _operator(each.target), args, kwargs, type_expr=each.type
        )
        reserve_name(graph, each.name)
        node.name = each.name
        node.meta.update(each.meta)
        found.append(node)
    root = torch.nn.Module()
    for name, member in record.members.items():
        setattr(root, name, _made(member) if isinstance(member, _GraphRecord) else member)
    made = GraphModule(root, graph)
    for name in record.members:
        setattr(made, name, getattr(root, name))
    made.meta.update(record.meta)
    return made


def _named(value: object) -> object:
    value = edge_operator(value) or value
    if isinstance(value, OpOverload):
        return _OperatorName(str(value), higher_order=False)
    name = getattr(value, "name", None)
    if isinstance(value, type(executorch_call_delegate)) or (
        callable(name) and value is getattr(torch.ops.higher_order, str(value), None)
    ):
        return _OperatorName(str(value), higher_order=True)
    return value


def _operator(value: object) -> Any:
    if not isinstance(value, _OperatorName):
        return value
    if value.name == str(executorch_call_delegate):
        return executorch_call_delegate
    found: Any = torch.ops.higher_order if value.higher_order else torch.ops
    for part in value.name.split("."):
        found = getattr(found, part)
    return found
