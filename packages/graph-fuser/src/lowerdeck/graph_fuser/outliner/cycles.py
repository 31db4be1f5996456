"""Find and report a short dependency cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from lowerdeck.graph_fuser.errors import CycleError
from lowerdeck.graph_fuser.outliner.boundary import Edges, Item
from lowerdeck.graph_fuser.regions import ROOT, RegionTree

_SHOWN = 12
"""Number of path nodes that a message shows at each end."""


def cycle_error(
    tree: RegionTree,
    edges: Edges,
    after: Mapping[Item, Sequence[Item]],
    stuck: set[Item],
) -> CycleError:
    """Return the error for a body without a topological order.

    Args:
        edges: Ordering constraints that involve a region, each with the graph edge that causes it.
        after: Successors of each item.
        stuck: Items on a cycle, or that depend on one.
    """
    loop = _shortest_loop(after, stuck)
    path: list[Node] = []
    for source, target in zip(loop, [*loop[1:], loop[0]], strict=True):
        path.extend(edges.get((source, target), (source, target)))  # type: ignore[arg-type]
    # A node that ends one edge and starts the next appears twice.
    steps = [
        node for number, node in enumerate(path) if not number or node is not path[number - 1]
    ]
    names = tuple(tree.name(tree.region_of.get(node, ROOT)) for node in steps)
    return CycleError(_explain(steps, names), tuple(steps), names)


def _explain(path: Sequence[Node], names: Sequence[str | None]) -> str:
    names_shown = [
        node.name if name is None else f"{node.name} (in {name!r})"
        for node, name in zip(path, names, strict=True)
    ]
    if len(names_shown) > 2 * _SHOWN:
        names_shown[_SHOWN:-_SHOWN] = [f"... {len(names_shown) - 2 * _SHOWN} more ..."]
    steps = " -> ".join(names_shown)
    return (
        "Outlining these regions would create a dependency cycle: "
        f"{steps}. "
        "Every arrow is a dependency or joins two nodes of one region. Take the path's outer "
        "nodes into the region, or split the region where the path leaves it."
    )


def _shortest_loop(after: Mapping[Item, Sequence[Item]], stuck: set[Item]) -> list[Item]:
    """Return a shortest cycle through one stuck item."""
    # Every stuck item has a stuck predecessor: walking back enters a cycle.
    before = {target: item for item in after if item in stuck for target in after[item]}
    walk = dict.fromkeys([next(item for item in after if item in stuck)])
    while (item := before[next(reversed(walk))]) not in walk:
        walk[item] = None
    cycle = list(walk)[list(walk).index(item) :]
    # Start at a region: every cycle contains one, as nodes alone are topologically sorted.
    start = next((item for item in cycle if isinstance(item, int)), item)
    came_from: dict[Item, Item] = {}
    queue = [start]
    for item in queue:  # breadth-first; grows during iteration
        for target in after[item]:
            if target == start:
                loop = [item]
                while loop[-1] != start:
                    loop.append(came_from[loop[-1]])
                return loop[::-1]
            if target in stuck and target not in came_from:
                came_from[target] = item
                queue.append(target)
    raise AssertionError("the walk back entered a cycle")
