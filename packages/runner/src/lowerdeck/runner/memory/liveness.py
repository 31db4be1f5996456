"""Liveness of values after each instruction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lowerdeck.runner.instructions import BoundChain, Instruction

Bits = int
"""A set of groups, as the bits of an integer."""


class Groups:
    """Values grouped by the memory that they may use.

    Values that a view or a move ties together form one group; every other value is its own.

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
        # The memory of a group with a move changes: no single write renews all of it.
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
        """Return the groups of ``values`` as bits."""
        bits = 0
        for index in values:
            bits |= 1 << self.of(index)
        return bits

    def renewed(self, values: Iterable[int]) -> Bits:
        """Return the groups of which nothing old is left once ``values`` are overwritten."""
        bits = 0
        for index in values:
            group = self.of(index)
            if self._renewed_by[index] and self._roots.get(group, index) == index:
                bits |= 1 << group
        return bits


@dataclass(frozen=True, slots=True)
class Liveness:
    """What is needed where.

    Attributes:
        after: For each chain and instruction, the groups needed after it.
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
    """Return which groups are needed after each instruction.

    What is read before anything has written it is state, too, as its bytes come from the call
    before.

    Args:
        groups: The values by memory.
        inputs: The values that the caller gives.
        outputs: The values that the caller takes.
        state: The values that the file says to be kept.
    """
    kept = groups.bits(state)
    from_caller = groups.bits(inputs)
    # What one call leaves for the next one is found by going round: what is read first is needed
    # at the end, which may make more so. It ends, since ``kept`` only grows.
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
    """Return what is needed before each instruction, and at the end."""
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
                # Without jumps one pass from the back has seen everything.
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
    """Return the numbers of the bits that are set, in ascending order."""
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return numbers
