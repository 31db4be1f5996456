"""Add nodes and copies of templates to a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node, map_arg

from lowerdeck.decompose._torch_private import COPIED_META, node_source
from lowerdeck.decompose.calls.facts import TensorFacts, facts_of, is_static, tensor_meta_of
from lowerdeck.decompose.calls.keys import Call
from lowerdeck.decompose.calls.template import Step, Template
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    add_node,
    expression_of,
    plain_number,
)

_INHERITED = frozenset({"stack_trace", *COPIED_META})


class InheritedMeta:
    """Metadata that new nodes inherit from an original node.

    Args:
        reader: Node whose module the new nodes belong to, if that is not the module of the source.
    """

    __slots__ = ("_meta", "source")

    def __init__(self, source: Node, reader: Node | None = None) -> None:
        self.source: Node = source
        self._meta: dict[str, Any] = {
            name: value for name, value in source.meta.items() if name in _INHERITED
        }
        stack = source.meta.get("nn_module_stack")
        if reader is not None and stack:
            # Outputs are read in the root module.
            outermost = dict([next(iter(stack.items()))])
            self._meta["nn_module_stack"] = reader.meta.get("nn_module_stack") or outermost
        # Shared by derived nodes, because a NodeSource is immutable.
        self._meta["from_node"] = [node_source(source)]

    def meta(self) -> dict[str, Any]:
        """Return metadata for a new node."""
        return {
            name: value.copy() if isinstance(value, (dict, list)) else value
            for name, value in self._meta.items()
        }


class Writer:
    """Adds nodes with metadata to a graph, and records the facts of their results.

    Args:
        mode: Fake mode of recorded values.

    Attributes:
        fixed: New nodes by original node: numbers read from tensors that an assertion fixes, and
            values computed from those numbers.
    """

    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self._mode = mode
        self._facts: dict[Node, Any] = {}
        self._symbols: dict[Any, Node] = {}
        self.fixed: dict[Node, Node] = {}
        self.is_dynamic: bool = False

    def facts(self, node: Node) -> Any:
        """Return the facts of a node."""
        return self._facts[node]

    def symbol(self, value: Any) -> Node | None:
        """Return the node of a symbol, or None."""
        return self._symbols.get((type(value), expression_of(value)))

    def record_facts(self, node: Node, facts: Any) -> None:
        """Record the facts of a new node.

        Args:
            facts: Result of ``facts_of``.
        """
        self._facts[node] = facts
        self.is_dynamic = self.is_dynamic or not is_static(facts)
        if isinstance(facts, SYMBOLS):
            self._symbols.setdefault((type(facts), expression_of(facts)), node)

    def add(
        self, target: Any, args: Any, kwargs: Any, name: str, value: Any, origin: InheritedMeta
    ) -> Node:
        """Add and return a call with a known result.

        Args:
            name: Name, before it is made unique.
            value: Fake result, or a number, or a tuple of them.
            origin: Inherited metadata.
        """
        node = add_node(self.graph, "call_function", target, args, name, kwargs)
        # Update in place: setting a node attribute is slow.
        node.meta.update(origin.meta(), val=value)
        facts = facts_of(value)
        if isinstance(value, FakeTensor):
            meta = origin.source.meta
            is_recorded = value is meta.get("val") and "tensor_meta" in meta
            node.meta["tensor_meta"] = (
                meta["tensor_meta"] if is_recorded else tensor_meta_of(value, facts)
            )
        if isinstance(target, OpOverload):
            node.meta["original_aten"] = target
        self.record_facts(node, facts)
        return node

    def splice(self, template: Template, call: Call, origin: InheritedMeta) -> Mapping[Node, Any]:
        """Add a copy of ``template``; return the new node of each template node.

        Args:
            origin: Inherited metadata.
        """
        new_nodes: dict[Node, Any] = dict(zip(template.inputs, call.nodes, strict=True))
        for step in template.steps:
            value = plain_number(step.facts)
            if isinstance(value, SYMBOLS):
                value = self.symbol(value)
            if isinstance(value, (int, float, bool, Node)):
                # Numbers that are constant or already computed are not computed again.
                new_nodes[step.node] = value
            else:
                new_nodes[step.node] = self._copy(step, new_nodes, origin)
        return new_nodes

    def _copy(self, step: Step, new_nodes: Mapping[Node, Any], origin: InheritedMeta) -> Node:
        look_up: Callable[[Node], Any] = new_nodes.__getitem__
        node = step.node
        args: Any = map_arg(node.args, look_up)
        kwargs: Any = map_arg(node.kwargs, look_up)
        new_node = add_node(self.graph, "call_function", node.target, args, step.name, kwargs)
        meta = new_node.meta
        meta.update(origin.meta(), **step.meta)
        if node.target is operator.getitem:
            # The value is an element of the source's.
            source: Any
            index: Any
            source, index = new_node.args
            meta["val"], facts = source.meta["val"][index], self._facts[source][index]
        else:
            meta["val"], facts = self.fake(step.facts), step.facts
        self.record_facts(new_node, facts)
        return new_node

    def fake(self, facts: Any) -> Any:
        """Return a fake value with the given facts.

        Args:
            facts: As ``facts_of`` returns them.
        """
        if isinstance(facts, TensorFacts):
            return facts.fake(self._mode)
        if isinstance(facts, (tuple, list)):
            return type(facts)(map(self.fake, facts))
        return facts
