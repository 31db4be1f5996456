"""Writing copies of templates into a graph."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node, map_arg

from lowerdeck.decompose._torch_private import COPIED_META, FakeTensors, node_source, tensor_meta
from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.keys import Call
from lowerdeck.decompose.calls.template import Step, Template, is_static
from lowerdeck.torch_base import (
    SYMBOLS,
    FakeTensor,
    OpOverload,
    add_node,
    expression_of,
    plain_number,
)


class InheritedMeta:
    """The meta that one node of the original program hands on.

    Args:
        source: The node.
        reader: The node in whose module they stand, where that is not the source's.
    """

    __slots__ = ("_meta", "source")

    def __init__(self, source: Node, reader: Node | None = None) -> None:
        self.source: Node = source
        meta = source.meta
        self._meta: dict[str, Any] = {
            name: meta[name] for name in ("stack_trace", *COPIED_META) if name in meta
        }
        stack = meta.get("nn_module_stack")
        if reader is not None and stack:
            # What the program returns is read in the outermost module.
            outermost = dict([next(iter(stack.items()))])
            self._meta["nn_module_stack"] = reader.meta.get("nn_module_stack") or outermost
        # Shared by all nodes that come from it: nobody changes a source.
        self._meta["from_node"] = [node_source(source)]

    def meta(self) -> dict[str, Any]:
        """Return meta for one more node."""
        return {
            name: copy.copy(value) if isinstance(value, (dict, list)) else value
            for name, value in self._meta.items()
        }


class Writer:
    """Writes nodes into a graph, with their meta, and knows what they give.

    Args:
        graph: The graph that is written.
        fakes: Creates the values of nodes.

    Attributes:
        is_dynamic: Whether a symbol was met.
    """

    def __init__(self, graph: Graph, fakes: FakeTensors) -> None:
        self.graph = graph
        self._fakes = fakes
        self._facts: dict[Node, Any] = {}
        self._symbols: dict[Any, Node] = {}
        self.is_dynamic: bool = False

    def facts(self, node: Node) -> Any:
        """Return the facts of a node that was written.

        Args:
            node: The node.
        """
        return self._facts[node]

    def symbol(self, value: Any) -> Node | None:
        """Return a node that gives a symbol already, or None.

        Args:
            value: The symbol.
        """
        return self._symbols.get((type(value), expression_of(value)))

    def know(self, node: Node, facts: Any) -> None:
        """Remember what a node gives.

        Args:
            node: The node, newly written.
            facts: Its facts.
        """
        self._facts[node] = facts
        self.is_dynamic = self.is_dynamic or not is_static(facts)
        if isinstance(facts, SYMBOLS):
            self._symbols.setdefault((type(facts), expression_of(facts)), node)

    def add(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str,
        value: Any,
        origin: InheritedMeta,
    ) -> Node:
        """Write a node as it is said, with a value that is known; return it.

        Args:
            target: What it calls.
            args: Its arguments: trees with nodes.
            kwargs: Its keywords.
            name: What it is called, before that is made unique.
            value: What it gives.
            origin: Where its meta comes from.
        """
        node = add_node(self.graph, "call_function", target, args, name, kwargs)
        node.meta = origin.meta()
        node.meta["val"] = value
        if isinstance(value, FakeTensor):
            node.meta["tensor_meta"] = tensor_meta(value)
        if isinstance(target, OpOverload):
            node.meta["original_aten"] = target
        return node

    def splice(self, template: Template, call: Call, origin: InheritedMeta) -> Mapping[Node, Any]:
        """Write a copy of ``template``; return what each of its nodes has become.

        Args:
            template: The template of the call.
            call: The call.
            origin: Where the meta comes from.
        """
        became: dict[Node, Any] = dict(zip(template.inputs, call.nodes, strict=True))
        for step in template.steps:
            known = plain_number(step.facts)
            if isinstance(known, SYMBOLS):
                known = self.symbol(known)
            if isinstance(known, (int, float, bool, Node)):
                # A number by now, or computed before: nothing is computed twice.
                became[step.node] = known
            else:
                became[step.node] = self._copy(step, became, origin)
        return became

    def _copy(self, step: Step, became: Mapping[Node, Any], origin: InheritedMeta) -> Node:
        look_up: Callable[[Node], Any] = became.__getitem__
        node = step.node
        args: Any = map_arg(node.args, look_up)
        kwargs: Any = map_arg(node.kwargs, look_up)
        made = add_node(self.graph, "call_function", node.target, args, step.name, kwargs)
        meta = made.meta = origin.meta()
        meta.update(step.meta)
        if node.target is operator.getitem:
            # The value is an element of what the source returns.
            source: Any
            index: Any
            source, index = made.args
            meta["val"], facts = source.meta["val"][index], self._facts[source][index]
        else:
            meta["val"], facts = self._value(step.facts), step.facts
        self.know(made, facts)
        return made

    def _value(self, facts: Any) -> Any:
        if isinstance(facts, TensorFacts):
            return facts.fake(self._fakes)
        if isinstance(facts, (tuple, list)):
            return type(facts)(map(self._value, facts))
        return facts
