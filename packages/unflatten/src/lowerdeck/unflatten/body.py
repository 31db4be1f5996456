"""Graph, source, signature and recorded calls of a generated module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_aggregate

from lowerdeck.torch_base import HigherOrderOperator, OpOverload, overload_name, pytree
from lowerdeck.unflatten._torch_private import packet_name
from lowerdeck.unflatten.call_signature import PENDING, CallSignature
from lowerdeck.unflatten.codegen.functions import deferred_function
from lowerdeck.unflatten.codegen.names import readable
from lowerdeck.unflatten.codegen.source import Source, write_source
from lowerdeck.unflatten.contract import RecordedCall, RootGuards, check, raise_for_argument
from lowerdeck.unflatten.cut.graphs import EXTRA_OUTPUTS, SITE
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.metadata import ADAPTER, PASS_THROUGH
from lowerdeck.unflatten.specializations import Function, Site


@dataclass(slots=True)
class Body:
    """One specialization of a generated module.

    Attributes:
        name: Canonical module name.
        built: The graph, or a function that builds it lazily.
        signature: Pytree structure of arguments and result; None if both are flat.
        attributes: Subgraphs of higher-order operators such as ``cond``.
        type_name: Qualified name of the eager module's type.
        source: The last generated source, or a function that generates it.
        calls: The recorded calls of this specialization.
        sites: Call sites of each child in all specializations, by the child's attribute path.
        others: Other specializations of the module.
        refusal: Why the module cannot be replaced or hooked, or "".
        is_moved: True after a move to another floating-point dtype.
        guards: Size guards of the program, on the root module.
        eager_type: Restored eager class of the module.
    """

    name: str
    built: Graph | Callable[[], Graph]
    signature: CallSignature | None = None
    attributes: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    type_name: str | None = None
    source: Source | Callable[[], Source] | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    sites: dict[str, Site] = field(default_factory=dict)
    others: Sequence[Body] = ()
    refusal: str = ""
    is_moved: bool = False
    guards: RootGuards | None = None
    eager_type: type[torch.nn.Module] | None = None

    @property
    def specializations(self) -> tuple[Body, ...]:
        """All specializations, this one first."""
        return (self, *self.others)

    @property
    def is_dispatched(self) -> bool:
        """Whether callers select a specialization or exchange extra inputs and outputs."""
        return bool(self.others) or (self.signature is not None and self.signature.has_extras)

    @property
    def graph(self) -> Graph:
        """The graph; its source is generated first, because callers may edit the graph."""
        self.latest()
        return self._build()

    def _build(self) -> Graph:
        if not isinstance(self.built, Graph):
            self.built = self.built()
        return self.built

    def write(self) -> Source:
        """Return newly generated source of the graph."""
        self.source = write_source(
            self._build(), self.signature, self.attributes, is_checked=True, is_root=not self.name
        )
        return self.source

    def latest(self) -> Source:
        """Return the last generated source."""
        if not isinstance(self.source, Source):
            self.source = (self.source or self.write)()
        return self.source

    def function(self) -> Function:
        """Return the function of this specialization, compiled at its first call.

        Missing source is generated at that call, or now if there is no signature.
        """
        signature = self.signature
        if signature is not None and self.source is None:
            # Copies of this body share the function and its code.
            self.source = cache(self.write)
            return deferred_function(signature.parameters, self.source)
        source = self.latest()
        return deferred_function(source.parameters, lambda: source)

    def compile(self) -> list[Function]:
        """Regenerate and return the functions of all specializations."""
        for body in self.specializations:
            body.write()
        return [body.function() for body in self.specializations]

    def text(self) -> str:
        """Return the source of all specializations."""
        first, *others = (readable(body.latest().text) for body in self.specializations)
        renamed = (
            text.replace("def forward(", f"def forward_{number}(", 1)
            for number, text in enumerate(others, start=1)
        )
        return "\n".join((first, *renamed))

    def check_arguments(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments of a call; return them, adapted to the exported structure if needed.

        Raises:
            InputConstraintError: The arguments match no recorded call or violate a size guard.
            InputStructureError: The pytree structure differs.
        """
        signature = self.signature
        leaves = list(args) if signature is None else signature.flatten(module, args, kwargs)
        for leaf in leaves:
            if isinstance(leaf, Proxy):
                # Otherwise a symbolic trace executes buffer writes instead of recording them.
                leaf.tracer.proxy_buffer_attributes = True
        mismatch = check(self.calls, leaves, any_float=self.is_moved)
        if mismatch is not None:
            if signature is None:
                labels = [f"value {number}" for number in range(len(leaves))]
            else:
                adapter = module.__dict__.get(ADAPTER)
                labels = adapter.get_flat_arg_paths() if adapter is not None else []
                if len(labels) != len(leaves):
                    labels = signature.leaf_labels(leaves)
            raise_for_argument(mismatch, labels, self.type_name or "this module")
        if self.guards is not None and not torch.compiler.is_exporting():
            self.guards.check(leaves)
        if signature is not None and signature.is_variadic:
            extras = {PENDING: kwargs[PENDING]} if PENDING in kwargs else {}
            args, own = pytree.tree_unflatten(leaves, signature.in_spec)
            kwargs = {**own, **extras}
        return args, kwargs

    def __deepcopy__(self, memo: dict[int, Any]) -> Body:
        """Return a body with its own graphs."""
        others = [copy.deepcopy(other, memo) for other in self.others]
        built = copy.deepcopy(self.built, memo) if isinstance(self.built, Graph) else self.built
        return replace(self, built=built, others=others)

    def __reduce__(self) -> tuple[Any, ...]:
        graph = record_graph(self.built if isinstance(self.built, Graph) else self.built())
        attributes = {name: record_module(module) for name, module in self.attributes.items()}
        options = {
            name: getattr(self, name)
            for name in (
                *("signature", "type_name", "calls", "sites", "others", "refusal"),
                *("is_moved", "guards", "eager_type"),
            )
        }
        return _restore_body, (self.name, graph, attributes, options)


def _restore_body(
    name: str, graph: Any, attributes: Mapping[str, Any], options: Mapping[str, Any]
) -> Body:
    modules = {path: restore_module(record) for path, record in attributes.items()}
    return Body(name, restore_graph(graph), attributes=modules, **options)


# Graphs as picklable plain data: operators by name, no example tensors.

_KEPT_META = ("stack_trace", "nn_module_stack", "closes", SITE, EXTRA_OUTPUTS)

NodeRecord = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""Kind, name, target, arguments, keyword arguments and meta of a node."""


@dataclass(frozen=True, slots=True)
class NodeReference:
    """Reference to a node by position, in recorded arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class OperatorName:
    """Name of an operator, or of a torch constant if the namespace is empty.

    Attributes:
        overload: None for a higher-order operator or a constant.
    """

    namespace: str
    name: str
    overload: str | None

    def resolve(self) -> Any:
        """Return the operator.

        Raises:
            UnflattenError: The operator's library is not loaded.
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
    """Record of a graph module, such as a cond branch, and the attributes its graph reads."""

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
    """Return a graph module as plain data; return other objects unchanged.

    torch pickles a graph module with its tracer, which may not be recreatable.
    """
    if not isinstance(module, GraphModule):
        return module
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    attributes = {name: record_module(attrgetter(name)(module)) for name in names}
    return ModuleRecord(record_graph(module.graph), attributes)


def restore_module(record: Any) -> Any:
    """Return the object that ``record_module`` recorded."""
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
