"""Whose value the bytes of planned memory hold."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator

Owners = frozenset[int]
"""The values that bytes may hold, by index; several where branches meet."""

NOBODY = -1
"""Stands for bytes that nothing has been written to."""


_Change = Callable[[Owners], Owners]


class OwnerMap:
    """The owners of the bytes of all planned memory, as ranges of equal owners.

    Args:
        memories: Number of memories.
    """

    def __init__(self, memories: int) -> None:
        nobody = frozenset((NOBODY,))
        self._starts: list[list[int]] = [[0] for _ in range(memories)]
        self._owners: list[list[Owners]] = [[nobody] for _ in range(memories)]

    def copy(self) -> OwnerMap:
        """Return an equal map."""
        made = OwnerMap(0)
        made._starts = [list(starts) for starts in self._starts]
        made._owners = [list(owners) for owners in self._owners]
        return made

    def of(self, memory: int, start: int, end: int) -> set[Owners]:
        """Return the owners of the bytes from ``start`` to ``end``, a set for each kind."""
        starts = self._starts[memory]
        first, last = bisect_right(starts, start) - 1, bisect_left(starts, end)
        return set(self._owners[memory][first:last])

    def give(self, memory: int, start: int, end: int, owners: Owners) -> None:
        """Make ``owners`` the owners of the bytes from ``start`` to ``end``."""
        self._replace(memory, start, end, lambda _: owners)

    def add(self, memory: int, start: int, end: int, owners: Owners) -> None:
        """Let ``owners`` be owners, too, of the bytes from ``start`` to ``end``."""
        self._replace(memory, start, end, lambda known: known | owners)

    def join(self, other: OwnerMap) -> bool:
        """Let the owners in ``other`` be owners here, too; return whether that is any change."""
        changed = False
        for memory in range(len(self._starts)):
            if (self._starts[memory], self._owners[memory]) == (
                other._starts[memory],
                other._owners[memory],
            ):
                continue
            for start, end, owners in other._ranges(memory):
                if not all(owners <= known for known in self.of(memory, start, end)):
                    self.add(memory, start, end, owners)
                    changed = True
        return changed

    def _ranges(self, memory: int) -> Iterator[tuple[int, int, Owners]]:
        starts = self._starts[memory]
        yield from zip(starts, [*starts[1:], 1 << 63], self._owners[memory], strict=True)

    def _replace(self, memory: int, start: int, end: int, change: _Change) -> None:
        starts, owners = self._starts[memory], self._owners[memory]
        first, last = bisect_right(starts, start) - 1, bisect_left(starts, end)
        after = last < len(starts) and starts[last] == end
        pieces = list(zip(starts[first:last], owners[first:last], strict=True))
        tail = pieces[-1][1]
        made: list[tuple[int, Owners]] = []
        if pieces[0][0] < start:
            made.append(pieces[0])
        made += _merged((max(at, start), change(known)) for at, known in pieces)
        if not after:
            made.append((end, tail))
        starts[first:last] = [at for at, _ in made]
        owners[first:last] = [known for _, known in made]


def _merged(pieces: Iterable[tuple[int, Owners]]) -> list[tuple[int, Owners]]:
    """Return ``pieces`` without borders between equal owners."""
    made: list[tuple[int, Owners]] = []
    for at, known in pieces:
        if not made or made[-1][1] != known:
            made.append((at, known))
    return made
