"""Results of a copied template, as values with their aliases."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import MAKES_VIEWS_ALONE
from lowerdeck.decompose.calls.keys import Slot
from lowerdeck.decompose.calls.memory import Memory, Value, View
from lowerdeck.decompose.calls.template import Result, Template, ViewStep
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.decompose.writer import Writer
from lowerdeck.torch_base import SYMBOLS, plain_number, varies


class CopiedResults:
    """The results of a copy of a template, as values.

    Args:
        writer: Wrote the copy.
        template: The template.
        inputs: What the call was given.
        became: What the nodes of the template have become.
        source: The node of the original graph that it was written for.
    """

    def __init__(
        self, writer: Writer, template: Template, inputs: Any, became: Any, source: Node
    ) -> None:
        self._writer = writer
        self._nodes = template.inputs
        self._positions = {node: index for index, node in enumerate(template.inputs)}
        self._inputs = inputs
        self._became = became
        self._source = source
        self._memories: dict[Node, Memory] = {}

    def tree(self, results: Any) -> Any:
        """Return results with values for tensors.

        Args:
            results: Those of the template, or some of them.
        """
        if isinstance(results, Result):
            return self._value(results)
        if isinstance(results, (tuple, list)):
            return type(results)(map(self.tree, results))
        return results

    def _value(self, result: Result) -> Any:
        if result.returned is not None:
            return self._inputs[result.returned]
        node = self._became[result.node]
        if not isinstance(node, Node) or isinstance(node.meta.get("val"), SYMBOLS):
            return node
        if result.fresh:
            return Value(node, Memory(node), requires_grad=result.requires_grad)
        views = tuple(map(self._view, result.views))
        position = self._positions.get(result.root)
        if position is not None:
            seen: Value = self._inputs[position]
            generation = _generation(seen.memory, views)
            return Value(node, seen.memory, seen.views + views, generation, result.requires_grad)
        memory = self._memories.get(result.root)
        if memory is None:
            memory = self._memories[result.root] = Memory(self._became[result.root])
        return Value(node, memory, views, requires_grad=result.requires_grad)

    def _view(self, seen: ViewStep) -> View:
        """Return a view of the template in nodes of the copy."""
        args, kwargs = self._with_nodes(seen.args), self._with_nodes(dict(seen.kwargs))
        return View(seen.target, args, kwargs, seen.index, self._source)

    def _with_nodes(self, tree: Any) -> Any:
        if isinstance(tree, Slot):
            return self._became[self._nodes[tree.index]]
        if isinstance(tree, (tuple, list)):
            return type(tree)(map(self._with_nodes, tree))
        if isinstance(tree, dict):
            return {name: self._with_nodes(value) for name, value in tree.items()}
        if not varies(tree):
            return plain_number(tree)
        known = self._writer.symbol(tree)
        if known is None:
            raise WholeProgramError("a view has a size that nothing in the program computes")
        return known


def _generation(memory: Memory, views: tuple[View, ...]) -> int:
    """Return of which generation new views of a memory are.

    In torch a view begins at the first, so that where the memory was written before, it is made
    anew when it is read. That can be told from the view itself only since one of several is made
    anew by another operator.
    """
    if MAKES_VIEWS_ALONE and any(view.alone() is not view for view in views):
        return 0
    return memory.generation
