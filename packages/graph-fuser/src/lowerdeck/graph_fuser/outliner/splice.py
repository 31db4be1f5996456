"""Replace the nodes of regions in a graph by calls."""

from __future__ import annotations

from torch.fx import Node
from torch.fx.node import map_arg

from lowerdeck.graph_fuser._torch_private import replace_hooks
from lowerdeck.graph_fuser.order import relink
from lowerdeck.graph_fuser.outliner.region_graph import GraphBuilder
from lowerdeck.graph_fuser.regions import ROOT
from lowerdeck.torch_base import erase_nodes_now


def splice_calls(graphs: GraphBuilder) -> None:
    """Call each outermost region in place of its nodes in the graph, which changes.

    Args:
        graphs: Holds the graph, and creates the calls.
    """
    tree, graph = graphs.tree, graphs.graph
    env: dict[Node, Node] = {}
    # In an order in which the arguments of each call exist.
    for child in graphs.schedule.calls():
        with graph.inserting_before(tree.nodes[tree.first[child]]):
            graphs.call(child, graph, env)
    _rewire(graphs, env)
    # Readers come after what they read, so that from the back no node has users.
    erase_nodes_now(graph, reversed(tree.region_of))
    stretch = graphs.schedule.stretches[ROOT]
    if stretch is not None:
        nodes: list[Node] = []
        for item in stretch.items:
            nodes.extend(graphs.calls[item].nodes if isinstance(item, int) else (item,))
        relink(nodes)


def _rewire(graphs: GraphBuilder, env: dict[Node, Node]) -> None:
    """Let every reader outside the regions read the calls' results."""
    readers: dict[Node, dict[Node, Node]] = {}
    for node, result in env.items():
        for user in node.users:
            if user not in graphs.tree.region_of:
                readers.setdefault(user, {})[node] = result
    for user, replacement in readers.items():
        replace_inputs(user, replacement)


def replace_inputs(user: Node, replacement: dict[Node, Node]) -> None:
    """Let ``user`` read ``replacement[node]`` wherever it read ``node``.

    One input is replaced in place; several in one pass over the arguments, so that a reader of
    many results costs its length once.

    Args:
        user: The node to change.
        replacement: From old inputs to new ones.
    """
    if len(replacement) == 1:
        ((old, new),) = replacement.items()
        user.replace_input_with(old, new)
        return
    for hook in replace_hooks(user.graph.owning_module):
        for old, new in replacement.items():
            hook(old=old, new=new.name, user=user)
    user.args = map_arg(user.args, lambda node: replacement.get(node, node))
    if user.kwargs:
        user.kwargs = map_arg(user.kwargs, lambda node: replacement.get(node, node))
