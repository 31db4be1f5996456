"""Results of a copied template, with their aliases."""

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
    new_nodes: Mapping[Node, Any],
    source: Node,
    *,
    writes: bool,
) -> Any:
    """Return the results of a copied template, with ``Value`` for tensors.

    Args:
        inputs: Distinct inputs of the call.
        new_nodes: New node of each template node.
        source: Original node of the call.
        writes: Whether the program mutates memory.

    Raises:
        WholeProgramError: A view has a symbolic size that no node computes.
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
        node = new_nodes[result.node]
        if not isinstance(node, Node) or isinstance(node.meta.get("val"), SYMBOLS):
            return node
        if result.fresh:
            return Value(node, Memory(node), requires_grad=result.requires_grad)
        # Views are only needed for later writes.
        views = tuple(map(bind, result.views)) if writes else ()
        if result.root in positions:
            base = inputs[positions[result.root]]
            memory, views = base.memory, base.views + views
        else:
            memory = memories.setdefault(result.root, Memory(new_nodes[result.root]))
        return Value(node, memory, views, memory.generation, result.requires_grad)

    def bind(view: View) -> View:
        """Return a view of the template with nodes of the copy."""
        nodes = [new_nodes[node] for node in template.inputs]
        args, kwargs = fill((view.args, dict(view.kwargs)), nodes, node_or_number)
        return replace(view, args=args, kwargs=kwargs, source=source)

    def node_or_number(number: Any) -> Any:
        if not varies(number):
            return plain_number(number)
        size_node = writer.symbol(number)
        if size_node is None:
            raise WholeProgramError("no node computes a symbolic size of a view")
        return size_node

    return visit(template.results)
