"""Results of a copied template, as values with their aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from lowerdeck.decompose.calls.keys import fill
from lowerdeck.decompose.calls.memory import Memory, Value, View
from lowerdeck.decompose.calls.template import Result, Template
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.decompose.writer import Writer
from lowerdeck.torch_base import SYMBOLS, plain_number, varies


def copied_results(
    writer: Writer,
    template: Template,
    inputs: Sequence[Any],
    became: Mapping[Node, Any],
    source: Node,
    *,
    writes: bool,
) -> Any:
    """Return the results of a copy of a template, with values for tensors.

    Args:
        writer: Has the symbols of the new graph.
        template: The decomposition of the call.
        inputs: Distinct inputs of the call.
        became: The new nodes of the template.
        source: The original node of the call.
        writes: Whether the program writes in place.
    """
    positions = {node: index for index, node in enumerate(template.inputs)}
    memories: dict[Node, Memory] = {}

    def visit(result: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(map(visit, result))
        if not isinstance(result, Result):
            return result
        if result.returned is not None:
            return inputs[result.returned]
        node = became[result.node]
        if not isinstance(node, Node) or isinstance(node.meta.get("val"), SYMBOLS):
            return node
        if result.fresh:
            return Value(node, Memory(node), requires_grad=result.requires_grad)
        # Only a later write goes through views.
        views = tuple(map(bind, result.views)) if writes else ()
        if result.root in positions:
            base = inputs[positions[result.root]]
            memory, views = base.memory, base.views + views
        else:
            memory = memories.setdefault(result.root, Memory(became[result.root]))
        return Value(node, memory, views, memory.generation, result.requires_grad)

    def bind(view: View) -> View:
        """Return a view of the template in nodes of the copy."""
        nodes = [became[node] for node in template.inputs]
        args, kwargs = fill((view.args, dict(view.kwargs)), nodes, node_or_number)
        return replace(view, args=args, kwargs=kwargs, source=source)

    def node_or_number(number: Any) -> Any:
        if not varies(number):
            return plain_number(number)
        size_node = writer.symbol(number)
        if size_node is None:
            raise WholeProgramError("a view has a symbolic size that no node computes")
        return size_node

    return visit(template.results)
