"""Where the nodes of a graph are in a picture: in rows below what they need."""

from __future__ import annotations

from collections.abc import Sequence

_SWEEPS = 4


def coordinates_of(needs: Sequence[Sequence[int]]) -> list[tuple[float, int]]:
    """Return column and row of each node, in time that grows with nodes and edges.

    A node is one row below the lowest that it needs. Rows are ordered by where neighbours
    are, a few times down and up, and then pulled below and above each other.

    Args:
        needs: For each node those that it needs, all of which come before it.

    Returns:
        Pairs of column and row. In a row columns are at least 1 apart; the leftmost is at 0.

    Example:
        >>> coordinates_of([[], [0], [0], [1, 2]])
        [(0.5, 0), (0.0, 1), (1.0, 1), (0.5, 2)]
    """
    if not needs:
        return []
    rows = _rows(needs)
    levels: list[list[int]] = [[] for _ in range(max(rows) + 1)]
    for node, row in enumerate(rows):
        levels[row].append(node)
    readers: list[list[int]] = [[] for _ in needs]
    for node, needed in enumerate(needs):
        for other in needed:
            readers[other].append(node)
    columns = [0.0] * len(needs)
    for level in levels:
        for column, node in enumerate(level):
            columns[node] = column - (len(level) - 1) / 2
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for level in levels if down else reversed(levels):
            _settle(level, needs if down else readers, columns)
    left = min(columns)
    return [(round(column - left, 3), row) for column, row in zip(columns, rows, strict=True)]


def _rows(needs: Sequence[Sequence[int]]) -> list[int]:
    rows: list[int] = []
    for needed in needs:
        rows.append(max((rows[other] + 1 for other in needed), default=0))
    return rows


def _settle(level: list[int], neighbours: Sequence[Sequence[int]], columns: list[float]) -> None:
    """Move the nodes of one row to the middle of their neighbours, as near as fits."""
    wanted = {}
    for node in level:
        others = neighbours[node]
        near = [columns[other] for other in others]
        wanted[node] = sum(near) / len(near) if near else columns[node]
    level.sort(key=lambda node: (wanted[node], columns[node]))
    free = float("-inf")
    for node in level:
        columns[node] = max(wanted[node], free)
        free = columns[node] + 1
    # Being pushed to the right only would let the picture lean: shift the row back.
    lean = sum(columns[node] - wanted[node] for node in level) / len(level)
    for node in level:
        columns[node] -= lean
