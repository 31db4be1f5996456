"""Interval map from the bytes of planned memory to the values that they contain."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

UNWRITTEN = -1
"""Owner of bytes that nothing has been written to."""


class OwnerMap:
    """The value that each byte of planned memory contains, as ranges of one value."""

    def __init__(self, memories: int) -> None:
        self._starts: list[list[int]] = [[0] for _ in range(memories)]
        self._owners: list[list[int]] = [[UNWRITTEN] for _ in range(memories)]

    def copy(self) -> OwnerMap:
        """Return an equal map."""
        copied = OwnerMap(0)
        copied._starts = [list(starts) for starts in self._starts]
        copied._owners = [list(owners) for owners in self._owners]
        return copied

    def of(self, memory: int, start: int, end: int) -> set[int]:
        """Return the owners of the bytes from ``start`` to ``end``."""
        starts = self._starts[memory]
        first, last = bisect_right(starts, start) - 1, bisect_left(starts, end)
        return set(self._owners[memory][first:last])

    def give(self, memory: int, start: int, end: int, owner: int) -> None:
        """Assign the bytes from ``start`` to ``end`` to one value."""
        starts, owners = self._starts[memory], self._owners[memory]
        first, last = bisect_left(starts, start), bisect_left(starts, end)
        goes_on = last == len(starts) or starts[last] != end
        tail = [(end, owners[last - 1])] if goes_on else []
        ranges = [(start, owner), *tail]
        starts[first:last] = [at for at, _ in ranges]
        owners[first:last] = [value for _, value in ranges]
