"""Calls that hide that they return their argument, of programs that write it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import GraphModule, Node

from lowerdeck.torch_base._torch_private import HigherOrderOperator
from lowerdeck.torch_base.behaviours import writes_in_place
from lowerdeck.torch_base.callees import hides_aliases
from lowerdeck.torch_base.graphs import attribute_of, nested_graphs
from lowerdeck.torch_base.memory import MemoryUse


def written_aliases(graph_module: GraphModule) -> frozenset[Node]:
    """Return the calls whose schemas hide that what they return may be written later.

    These are calls of what ``hides_aliases`` names, after which something writes memory that their
    result may share, by whichever name, in the graph or around it. Torch's functionalisation,
    which takes schemas at their word, loses such writes where the call stays whole.

    Args:
        graph_module: Its own graph is looked at, and those that its nodes are given.
    """
    if not writes_in_place(graph_module):
        return frozenset()
    return frozenset(_written(graph_module, outside=False))


def _written(gm: GraphModule, *, outside: bool) -> Iterator[Node]:
    """Yield such calls of one graph and of those in it.

    Args:
        gm: A graph.
        outside: Whether what goes in or out may be written later by whoever calls it.
    """
    regions = dict(nested_graphs(gm))
    asked = [node for node in gm.graph.nodes if hides_aliases(node.target)]
    if not asked and not regions:
        return
    memory = MemoryUse(gm.graph, gm)
    position = {node: number for number, node in enumerate(gm.graph.nodes)}
    seen = {memory.group(node) for node in _ends(gm)} if outside else set()

    def is_written_later(node: Node) -> bool:
        writers = memory.writers(node)
        later = bool(writers) and position[writers[-1]] > position[node]
        return later or memory.group(node) in seen

    yield from filter(is_written_later, asked)
    for reference in regions:
        inner = attribute_of(gm, reference)
        if isinstance(inner, GraphModule):
            callers = filter(_is_inlined, reference.users)
            yield from _written(inner, outside=any(map(is_written_later, callers)))


def _ends(gm: GraphModule) -> Iterable[Node]:
    """Return what a graph is given and returns."""
    return (*gm.graph.find_nodes(op="placeholder"), *gm.graph.output_node().all_input_nodes)


def _is_inlined(node: Node) -> bool:
    """Return whether a call is of a region that shares memory with what is around it.

    Control flow does not: what its graphs are given and return is told by values.
    """
    return isinstance(node.target, HigherOrderOperator) and str(node.target.__name__).startswith(
        "wrap_with_"
    )
