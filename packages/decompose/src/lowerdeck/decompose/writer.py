"""Copies of templates in a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node, map_arg

from lowerdeck.decompose._torch_private import COPIED_META, FakeTensors, node_source, tensor_meta
from lowerdeck.decompose.calls.facts import TensorFacts, facts_of, is_static
from lowerdeck.decompose.calls.keys import Call
from lowerdeck.decompose.calls.template import Step, Template
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensor,
    OpOverload,
    add_node,
    expression_of,
    plain_number,
)

_INHERITED = frozenset({"stack_trace", *COPIED_META})


class InheritedMeta:
    """The metadata that new nodes inherit from one node of the original program.

    Args:
        reader: The node whose module they belong to, if it is not that of the source.
    """

    __slots__ = ("_meta", "source")

    def __init__(self, source: Node, reader: Node | None = None) -> None:
        self.source: Node = source
        self._meta: dict[str, Any] = {
            name: value for name, value in source.meta.items() if name in _INHERITED
        }
        stack = source.meta.get("nn_module_stack")
        if reader is not None and stack:
            # What the program returns is read in the outermost module.
            outermost = dict([next(iter(stack.items()))])
            self._meta["nn_module_stack"] = reader.meta.get("nn_module_stack") or outermost
        # Shared by all derived nodes: a NodeSource is never changed.
        self._meta["from_node"] = [node_source(source)]

    def meta(self) -> dict[str, Any]:
        """Return metadata for one more node."""
        return {
            name: value.copy() if isinstance(value, (dict, list)) else value
            for name, value in self._meta.items()
        }


class Writer:
    """Adds nodes to a graph, with their metadata, and records the facts of their results.

    Args:
        fakes: Creates the recorded values of nodes.

    Attributes:
        is_dynamic: Whether any result has a symbol.
    """

    def __init__(self, graph: Graph, fakes: FakeTensors) -> None:
        self.graph = graph
        self._fakes = fakes
        self._facts: dict[Node, Any] = {}
        self._symbols: dict[Any, Node] = {}
        self.is_dynamic: bool = False

    def facts(self, node: Node) -> Any:
        """Return the facts of a node.

        Args:
            node: A node of the new graph.
        """
        return self._facts[node]

    def symbol(self, value: Any) -> Node | None:
        """Return a node that computes a symbol, or None."""
        return self._symbols.get((type(value), expression_of(value)))

    def know(self, node: Node, facts: Any) -> None:
        """Record the facts of a new node.

        Args:
            node: A node of the new graph.
            facts: As ``facts_of`` returns them.
        """
        self._facts[node] = facts
        self.is_dynamic = self.is_dynamic or not is_static(facts)
        if isinstance(facts, SYMBOLS):
            self._symbols.setdefault((type(facts), expression_of(facts)), node)

    def add(
        self, target: Any, args: Any, kwargs: Any, name: str, value: Any, origin: InheritedMeta
    ) -> Node:
        """Add a call with a known result; return it.

        Args:
            target: A function or an operator.
            name: Its name, before it is made unique.
            origin: The metadata that it inherits.
        """
        node = add_node(self.graph, "call_function", target, args, name, kwargs)
        # Filled, not replaced: setting an attribute of a node looks the node up in its graph.
        node.meta.update(origin.meta(), val=value)
        if isinstance(value, FakeTensor):
            meta = origin.source.meta
            is_recorded = value is meta.get("val") and "tensor_meta" in meta
            node.meta["tensor_meta"] = meta["tensor_meta"] if is_recorded else tensor_meta(value)
        if isinstance(target, OpOverload):
            node.meta["original_aten"] = target
        self.know(node, facts_of(value))
        return node

    def splice(self, template: Template, call: Call, origin: InheritedMeta) -> Mapping[Node, Any]:
        """Add a copy of ``template``; return the new node of each of its nodes.

        Args:
            template: The decomposition of the call.
            origin: The metadata that the nodes inherit.
        """
        became: dict[Node, Any] = dict(zip(template.inputs, call.nodes, strict=True))
        for step in template.steps:
            value = plain_number(step.facts)
            if isinstance(value, SYMBOLS):
                value = self.symbol(value)
            if isinstance(value, (int, float, bool, Node)):
                # A constant in this program, or computed before: no number is computed twice.
                became[step.node] = value
            else:
                became[step.node] = self._copy(step, became, origin)
        return became

    def _copy(self, step: Step, became: Mapping[Node, Any], origin: InheritedMeta) -> Node:
        look_up: Callable[[Node], Any] = became.__getitem__
        node = step.node
        args: Any = map_arg(node.args, look_up)
        kwargs: Any = map_arg(node.kwargs, look_up)
        new_node = add_node(self.graph, "call_function", node.target, args, step.name, kwargs)
        meta = new_node.meta
        meta.update(origin.meta(), **step.meta)
        if node.target is operator.getitem:
            # The value is an element of what the source returns.
            source: Any
            index: Any
            source, index = new_node.args
            meta["val"], facts = source.meta["val"][index], self._facts[source][index]
        else:
            meta["val"], facts = self._value(step.facts), step.facts
        self.know(new_node, facts)
        return new_node

    def _value(self, facts: Any) -> Any:
        if isinstance(facts, TensorFacts):
            return facts.fake(self._fakes)
        if isinstance(facts, (tuple, list)):
            return type(facts)(map(self._value, facts))
        return facts
