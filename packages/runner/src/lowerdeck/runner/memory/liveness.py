"""Liveness of values after each instruction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lowerdeck.runner.instructions import BoundChain, Instruction

Bits = int
"""A set of groups, as the bits of an integer."""


class Groups:
    """Values grouped by the memory that they may use.

    Values related by a view or a move form one group; every other value is a group of its own.

    Args:
        count: Number of values of the method.
        views: Pairs of values (base, view).
        moves: Pairs of registers (from, to).
    """

    def __init__(
        self, count: int, views: Iterable[tuple[int, int]], moves: Iterable[tuple[int, int]]
    ) -> None:
        self._parent = list(range(count))
        derived = {target for _, target in views}
        for source, target in (*views, *moves):
            self._parent[self.of(source)] = self.of(target)
        # The memory of a group with a move changes: no single write overwrites all of it.
        moved = {self.of(index) for pair in moves for index in pair}
        self._renewed_by = [
            self.of(index) not in moved and index not in derived for index in range(count)
        ]
        self._roots: dict[int, int] = {}
        for source, _ in views:
            if source not in derived:
                root = self.of(source)
                if self._roots.setdefault(root, source) != source:
                    self._roots[root] = -1

    def of(self, index: int) -> int:
        """Return the group of the value ``index``."""
        parent = self._parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def bits(self, values: Iterable[int]) -> Bits:
        """Return the groups of ``values`` as a bit set."""
        bits = 0
        for index in values:
            bits |= 1 << self.of(index)
        return bits

    def renewed(self, values: Iterable[int]) -> Bits:
        """Return the groups that are overwritten completely by writing ``values``."""
        bits = 0
        for index in values:
            group = self.of(index)
            if self._renewed_by[index] and self._roots.get(group, index) == index:
                bits |= 1 << group
        return bits


@dataclass(frozen=True, slots=True)
class Liveness:
    """Live groups.

    Attributes:
        after: For each chain and instruction, the groups live after it.
        kept: The groups that keep their bytes from call to call.
    """

    after: tuple[tuple[Bits, ...], ...]
    kept: Bits


def analyse(
    chains: Sequence[BoundChain],
    groups: Groups,
    *,
    inputs: Collection[int],
    outputs: Collection[int],
    state: Collection[int],
) -> Liveness:
    """Return the groups that are live after each instruction.

    A value that is read before anything has written it counts as state: its bytes come from the
    previous call.

    Args:
        groups: The values by memory.
        inputs: The inputs of the method.
        outputs: The outputs of the method.
        state: The values that are state according to the file.
    """
    kept = groups.bits(state)
    from_caller = groups.bits(inputs)
    # Iterate to a fixed point: a value read first in the next call is live at the end of this
    # one, which may make more values live. It terminates, because ``kept`` only grows.
    while True:
        at_end = groups.bits(outputs) | kept
        after: list[tuple[Bits, ...]] = []
        for chain in reversed(chains):
            before = _before(chain, groups, at_end)
            after.append(tuple(_any(before, targets) for targets in chain.follow))
            at_end = before[0]
        all_kept = kept | at_end & ~from_caller
        if all_kept == kept:
            return Liveness(tuple(reversed(after)), kept)
        kept = all_kept


def _before(chain: BoundChain, groups: Groups, at_end: Bits) -> list[Bits]:
    """Return the groups live before each instruction, and at the end."""
    effects = [_effect(groups, item) for item in chain.instructions]
    before: list[Bits] = [0] * len(effects) + [at_end]
    changed = True
    while changed:
        changed = False
        for index in range(len(effects) - 1, -1, -1):
            reads, renewed = effects[index]
            needed = _any(before, chain.follow[index]) & ~renewed | reads
            if needed != before[index]:
                before[index] = needed
                # Without jumps one backward pass suffices.
                changed = chain.jumps
    return before


def _effect(groups: Groups, item: Instruction) -> tuple[Bits, Bits]:
    return groups.bits(item.reads), groups.renewed(item.overwrites)


def _any(before: Sequence[Bits], targets: Iterable[int]) -> Bits:
    needed = 0
    for target in targets:
        needed |= before[target]
    return needed


def members(bits: Bits) -> list[int]:
    """Return the indices of the bits that are set, in ascending order."""
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return numbers
