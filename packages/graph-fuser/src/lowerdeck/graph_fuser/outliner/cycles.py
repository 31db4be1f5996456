"""Find a short circle among items that wait for each other, and put it in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from torch.fx import Node

from lowerdeck.graph_fuser.errors import CycleError
from lowerdeck.graph_fuser.outliner.boundary import Item

_SHOWN = 12
"""How many nodes of a path a message shows at each end; the error itself has them all."""


def cycle_error(path: Sequence[Node], names: Sequence[str | None]) -> CycleError:
    """Return the error that shows a path.

    Args:
        path: The nodes; each is followed by one that depends on it or shares its region.
        names: The region of each, or None.
    """
    return CycleError(_explain(path, names), tuple(path), tuple(names))


def _explain(path: Sequence[Node], names: Sequence[str | None]) -> str:
    shown = [
        node.name if name is None else f"{node.name} (in {name!r})"
        for node, name in zip(path, names, strict=True)
    ]
    if len(shown) > 2 * _SHOWN:
        shown[_SHOWN:-_SHOWN] = [f"... {len(shown) - 2 * _SHOWN} more ..."]
    steps = " -> ".join(shown)
    return (
        "These regions cannot each become one call, because one would need its own result: "
        f"{steps}. "
        "Every arrow is a dependency, or ties two nodes of one region. Take the path's outer "
        "nodes into the region, or split the region where the path leaves it."
    )


def shortest_loop(after: Mapping[Item, Sequence[Item]], stuck: set[Item]) -> list[Item]:
    """Return a loop through one stuck item; every stuck item has a stuck predecessor."""
    before: dict[Item, Item] = {}
    for item in after:
        if item in stuck:
            for target in after[item]:
                if target in stuck:
                    before.setdefault(target, item)
    current = next(item for item in after if item in stuck)
    seen: set[Item] = set()
    while current not in seen:
        seen.add(current)
        current = before[current]
    loop = [current]
    while before[loop[-1]] != current:
        loop.append(before[loop[-1]])
    start = next((item for item in loop if isinstance(item, int)), current)
    return _way_back(after, stuck, start)


def _way_back(after: Mapping[Item, Sequence[Item]], stuck: set[Item], start: Item) -> list[Item]:
    came_from: dict[Item, Item] = {}
    queue = deque([start])
    while queue:
        item = queue.popleft()
        for target in after[item]:
            if target == start:
                loop = [item]
                while loop[-1] != start:
                    loop.append(came_from[loop[-1]])
                return loop[::-1]
            if target in stuck and target not in came_from:
                came_from[target] = item
                queue.append(target)
    raise AssertionError("a stuck item always lies on or before a loop that was already walked")
