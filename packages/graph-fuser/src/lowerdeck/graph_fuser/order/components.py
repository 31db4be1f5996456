"""Strongly connected components of a directed graph."""

from __future__ import annotations

from collections.abc import Sequence


def strong_components(count: int, after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected components of a directed graph, in topological order.

    Args:
        after: Successors of each vertex.
    """
    # Tarjan's algorithm with an explicit stack: graphs exceed the recursion limit.
    order = [-1] * count
    low = [0] * count
    open_: list[int] = []
    is_open = [False] * count
    components: list[list[int]] = []
    clock = 0
    for root in range(count - 1, -1, -1):
        if order[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            vertex, index = work.pop()
            if index == 0:
                order[vertex] = low[vertex] = clock
                clock += 1
                open_.append(vertex)
                is_open[vertex] = True
            targets = after[vertex]
            pushed = False
            while index < len(targets):
                target = targets[index]
                index += 1
                if order[target] < 0:
                    work.append((vertex, index))
                    work.append((target, 0))
                    pushed = True
                    break
                if is_open[target]:
                    low[vertex] = min(low[vertex], order[target])
            if pushed:
                continue
            # If no open vertex below is reachable, the component is complete.
            if low[vertex] == order[vertex]:
                component: list[int] = []
                while True:
                    member = open_.pop()
                    is_open[member] = False
                    component.append(member)
                    if member == vertex:
                        break
                components.append(sorted(component))
            if work:
                above = work[-1][0]
                low[above] = min(low[above], low[vertex])
    # Tarjan's algorithm completes successors first.
    components.reverse()
    return components
