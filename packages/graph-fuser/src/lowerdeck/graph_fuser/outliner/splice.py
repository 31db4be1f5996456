"""Put calls into a graph in place of the nodes that they stand for."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from lowerdeck.graph_fuser._torch_private import replace_hooks
from lowerdeck.graph_fuser.order import relink
from lowerdeck.graph_fuser.outliner.boundary import Boundary
from lowerdeck.graph_fuser.outliner.region_graph import GraphBuilder
from lowerdeck.graph_fuser.outliner.schedule import Schedule
from lowerdeck.graph_fuser.regions import ROOT, RegionTree
from lowerdeck.torch_base import erase_nodes_now


def splice_root(
    graphs: GraphBuilder, made_by: Callable[[int], tuple[Node, ...]]
) -> dict[Node, Node]:
    """Call each outermost region in place of its nodes in the graph; return the map of values.

    Args:
        graphs: Holds the outermost graph, which is changed, and creates the calls.
        made_by: Returns the nodes that were created for the call of a region, in their order.
    """
    if graphs.tree.is_moved:
        relink(list(graphs.tree.position))
    root_nodes = graphs.root_nodes()
    env = dict(zip(root_nodes, root_nodes, strict=True))
    _insert_calls(graphs, made_by, env)
    _rewire(graphs.tree, graphs.boundary, env)
    _erase(graphs.graph, graphs.tree)
    for _, _, items in graphs.plan.bodies[ROOT].windows:
        relink(
            [
                node
                for item in items
                for node in (made_by(item) if isinstance(item, int) else (item,))
            ],
        )
    return env


def _insert_calls(
    graphs: GraphBuilder,
    made_by: Callable[[int], tuple[Node, ...]],
    env: dict[Node, Node],
) -> None:
    graph, plan = graphs.graph, graphs.plan
    key = plan.bodies[ROOT].key
    nodes = list(graphs.tree.position)
    tail: dict[Node, Node] = {}
    for child in _call_order(plan, key):
        index, rank = divmod(key[child], plan.stride)
        slot = nodes[index]
        # Before what follows, not after the slot: each new node would push the last one back.
        follows = tail[slot].next if slot in tail else slot.next if rank else slot
        with graph.inserting_before(follows):
            graphs.call(child, graph, env)
        tail[slot] = made_by(child)[-1]


def _call_order(plan: Schedule, key: dict[int, int]) -> list[int]:
    """Return the called regions in an order in which each one's arguments exist."""
    order = sorted(key, key=key.__getitem__)
    windows = plan.bodies[ROOT].windows
    if not windows:
        return order
    inside = {
        item: (number, index)
        for number, (_, _, items) in enumerate(windows)
        for index, item in enumerate(items)
        if isinstance(item, int)
    }
    starts = [low for low, _, _ in windows]

    def rank(child: int) -> tuple[int, int]:
        if child in inside:
            number, index = inside[child]
            return starts[number], index
        return key[child], -1

    return sorted(order, key=rank)


def _rewire(tree: RegionTree, boundary: Boundary, env: dict[Node, Node]) -> None:
    """Let every reader outside the regions read the calls' results."""
    readers: dict[Node, dict[Node, Node]] = {}
    region_of = tree.region_of
    for child in tree.children[ROOT]:
        for node in boundary.outputs[child]:
            for user in node.users:
                if user in env and user not in region_of:
                    readers.setdefault(user, {})[node] = env[node]
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


def _erase(graph: Graph, tree: RegionTree) -> None:
    """Erase the nodes that moved into regions, readers first."""
    position = tree.position
    doomed = list(reversed(tree.region_of))
    for node in doomed:
        # Only in a graph out of order does a reader come before what it reads.
        if any(position[user] < position[node] for user in node.users if user in position):
            for reader in doomed:
                reader.args, reader.kwargs = (), {}
            break
    erase_nodes_now(graph, doomed)
