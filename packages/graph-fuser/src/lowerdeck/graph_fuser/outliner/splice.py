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
    """Replace the nodes of each outermost region by a call, in place.

    Args:
        graphs: Owner of the graph; creates the calls.
    """
    tree, graph = graphs.tree, graphs.graph
    env: dict[Node, Node] = {}
    # Topological order: the arguments of each call exist.
    for child in graphs.schedule.calls():
        with graph.inserting_before(tree.nodes[tree.first[child]]):
            graphs.call(child, graph, env)
    _rewire(graphs, env)
    # Erase in reverse topological order: no erased node has users.
    erase_nodes_now(graph, reversed(tree.region_of))
    stretch = graphs.schedule.stretches[ROOT]
    if stretch is not None:
        nodes: list[Node] = []
        for item in stretch.items:
            nodes.extend(graphs.calls[item].nodes if isinstance(item, int) else (item,))
        relink(nodes)


def _rewire(graphs: GraphBuilder, env: dict[Node, Node]) -> None:
    """Redirect uses outside of the regions to the calls' results."""
    readers: dict[Node, dict[Node, Node]] = {}
    for node, result in env.items():
        for user in node.users:
            if user not in graphs.tree.region_of:
                readers.setdefault(user, {})[node] = result
    for user, replacement in readers.items():
        replace_inputs(user, replacement)


def replace_inputs(user: Node, replacement: dict[Node, Node]) -> None:
    """Replace each input ``node`` of ``user`` by ``replacement[node]``.

    Several inputs are replaced in one pass over the arguments, to stay linear for users of many
    results.
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
