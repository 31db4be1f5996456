"""A graph as plain data that pickles: operators by name, values of example tensors left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import HigherOrderOperator, OpOverload, overload_name
from lowerdeck.unflatten._torch_private import packet_name
from lowerdeck.unflatten.calls.carrying import CARRIES
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.results import GIVEN_BACK, RETURNS, SIZES, sizes_of

_KEPT_META = ("stack_trace", "nn_module_stack", "closes", CARRIES, GIVEN_BACK, RETURNS)


@dataclass(frozen=True, slots=True)
class NodeReference:
    """Stands for a node in recorded arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class OperatorName:
    """Stands for an operator."""

    namespace: str
    name: str
    overload: str | None

    def resolve(self) -> Any:
        """Return the operator.

        Raises:
            UnflattenError: No library that defines it is loaded.
        """
        try:
            found = getattr(getattr(torch.ops, self.namespace), self.name)
            return found if self.overload is None else getattr(found, self.overload)
        except AttributeError as error:
            raise UnflattenError(
                f"The operator {self.namespace}::{self.name} is not registered; import the "
                "library that "
                "defines it before loading the module."
            ) from error


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A graph.

    Attributes:
        nodes: For each node its kind, name, target, arguments, keyword arguments and meta.
    """

    nodes: tuple[tuple[str, str, Any, Any, Any, dict[str, Any]], ...]

    def graph(self) -> Graph:
        """Return a new graph equal to the recorded one."""
        graph = Graph()
        made: list[Node] = []

        def value(item: Any) -> Any:
            if isinstance(item, NodeReference):
                return made[item.index]
            return item.resolve() if isinstance(item, OperatorName) else item

        for op, name, target, args, kwargs, meta in self.nodes:
            node = graph.create_node(
                op, value(target), map_aggregate(args, value), map_aggregate(kwargs, value), name
            )
            node.meta.update(meta)
            made.append(node)
        return graph


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A graph module, such as a branch of a cond.

    Attributes:
        graph: Its graph.
        held: What the graph reads by attribute.
    """

    graph: GraphRecord
    held: Mapping[str, Any]

    def module(self) -> GraphModule:
        """Return a new graph module equal to the recorded one."""
        held = {
            name: value.module() if isinstance(value, ModuleRecord) else value
            for name, value in self.held.items()
        }
        return GraphModule(held, self.graph.graph())


def record_module(module: Any) -> Any:
    """Return a graph module as plain data, anything else as it is.

    torch pickles it by the tracer that made it, which may not be one that it can make again.
    """
    if not isinstance(module, GraphModule):
        return module
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    held = {name: record_module(attrgetter(name)(module)) for name in names}
    return ModuleRecord(record_graph(module.graph), held)


def record_graph(graph: Graph) -> GraphRecord:
    """Return ``graph`` as plain data."""
    indices = {node: index for index, node in enumerate(graph.nodes)}

    def value(item: Any) -> Any:
        return NodeReference(indices[item]) if isinstance(item, Node) else _named(item)

    return GraphRecord(
        tuple(
            (
                node.op,
                node.name,
                _named(node.target),
                map_aggregate(node.args, value),
                map_aggregate(node.kwargs, value),
                _kept(node),
            )
            for node in graph.nodes
        )
    )


def _kept(node: Node) -> dict[str, Any]:
    kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    if (sizes := sizes_of(node)) is not None:
        kept[SIZES] = sizes
    return kept


def _named(item: Any) -> Any:
    if isinstance(item, OpOverload):
        return OperatorName(item.namespace, str(packet_name(item)), overload_name(item))
    if isinstance(item, HigherOrderOperator):
        return OperatorName("higher_order", item.__name__, None)
    return item
