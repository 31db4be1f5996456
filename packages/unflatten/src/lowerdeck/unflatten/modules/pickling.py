"""Graphs as plain data that pickles: operators by name, without example tensors."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import HigherOrderOperator, OpOverload, overload_name
from lowerdeck.unflatten._torch_private import packet_name
from lowerdeck.unflatten.cut.graphs import EXTRA_OUTPUTS, SITE
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.notes import PASS_THROUGH

_KEPT_META = ("stack_trace", "nn_module_stack", "closes", SITE, EXTRA_OUTPUTS)

NodeRecord = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""Kind, name, target, arguments, keyword arguments and meta of a node."""


@dataclass(frozen=True, slots=True)
class NodeReference:
    """A node in recorded arguments, by its position."""

    index: int


@dataclass(frozen=True, slots=True)
class OperatorName:
    """An operator, or a constant of torch where the namespace is empty, by name."""

    namespace: str
    name: str
    overload: str | None

    def resolve(self) -> Any:
        """Return the operator.

        Raises:
            UnflattenError: The library that defines it is not loaded.
        """
        if not self.namespace:
            return getattr(torch, self.name)
        try:
            packet = getattr(getattr(torch.ops, self.namespace), self.name)
            return packet if self.overload is None else getattr(packet, self.overload)
        except AttributeError as error:
            raise UnflattenError(
                f"The operator {self.namespace}::{self.name} is not registered; import the "
                "library that defines it before loading the module."
            ) from error


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A graph module, such as a branch of a cond, with the attributes that its graph reads."""

    graph: tuple[NodeRecord, ...]
    attributes: dict[str, Any]


def record_graph(graph: Graph) -> tuple[NodeRecord, ...]:
    """Return ``graph`` as plain data."""
    indices = {node: index for index, node in enumerate(graph.nodes)}

    def value(item: Any) -> Any:
        return NodeReference(indices[item]) if isinstance(item, Node) else _by_name(item)

    return tuple(
        (
            node.op,
            node.name,
            _by_name(node.target),
            map_aggregate(node.args, value),
            map_aggregate(node.kwargs, value),
            _kept_meta(node),
        )
        for node in graph.nodes
    )


def restore_graph(record: tuple[NodeRecord, ...]) -> Graph:
    """Return a new graph equal to the recorded one."""
    graph = Graph()
    nodes: list[Node] = []

    def value(item: Any) -> Any:
        if isinstance(item, NodeReference):
            return nodes[item.index]
        return item.resolve() if isinstance(item, OperatorName) else item

    for op, name, target, args, kwargs, meta in record:
        node = graph.create_node(
            op, value(target), map_aggregate(args, value), map_aggregate(kwargs, value), name
        )
        node.meta.update(meta)
        nodes.append(node)
    return graph


def record_module(module: Any) -> Any:
    """Return a graph module as plain data, anything else as it is.

    torch pickles a graph module by its tracer, which it may not be able to recreate.
    """
    if not isinstance(module, GraphModule):
        return module
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    attributes = {name: record_module(attrgetter(name)(module)) for name in names}
    return ModuleRecord(record_graph(module.graph), attributes)


def restore_module(record: Any) -> Any:
    """Return what ``record_module`` recorded."""
    if not isinstance(record, ModuleRecord):
        return record
    attributes = {name: restore_module(value) for name, value in record.attributes.items()}
    return GraphModule(attributes, restore_graph(record.graph))


def _kept_meta(node: Node) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    if PASS_THROUGH in (node.meta.get("custom") or ()):
        kept["custom"] = {PASS_THROUGH: True}
    return kept


def _by_name(item: Any) -> Any:
    if isinstance(item, OpOverload):
        return OperatorName(item.namespace, str(packet_name(item)), overload_name(item))
    if isinstance(item, HigherOrderOperator):
        return OperatorName("higher_order", item.__name__, None)
    if isinstance(item, (torch.memory_format, torch.layout)):
        # The protocol of torch.save cannot pickle these.
        return OperatorName("", str(item).removeprefix("torch."), None)
    return item
