"""Liveness of values after each instruction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lowerdeck.runner.instructions import BoundChain
from lowerdeck.runner.operators import COPY_INDEX

Bits = int
"""A set of groups, as the bits of an integer."""

Range = tuple[int, int, int]
"""Memory, first byte, and the byte after the last."""


class Groups:
    """Values grouped by the memory that they use.

    A value and its aliases form one group; every other value is a group of its own.

    Args:
        count: Number of values of the method.
        aliases: Pairs of values (base, alias).
        moves: Pairs of registers (from, to): ``to`` gets the memory of ``from``.
        ranges: The bytes of each planned value.
    """

    def __init__(
        self,
        count: int,
        aliases: Sequence[tuple[int, int]],
        moves: Sequence[tuple[int, int]],
        ranges: Mapping[int, Range],
    ) -> None:
        self._parent = list(range(count))
        for base, alias in aliases:
            self._parent[self.of(base)] = self.of(alias)
        self._moves = [(self.of(source), self.of(target)) for source, target in moves]
        extents: dict[int, Range] = {}
        for index, (memory, start, end) in ranges.items():
            _, first, last = extents.get(self.of(index), (memory, start, end))
            extents[self.of(index)] = memory, min(first, start), max(last, end)
        self._partial = {i for i, range_ in ranges.items() if range_ != extents[self.of(i)]}

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
        return self.bits(index for index in values if index not in self._partial)

    def with_moved(self, bits: Bits) -> Bits:
        """Return ``bits`` and the groups whose memory a move may have given to one of them."""
        former = -1
        while bits != former:
            former = bits
            for source, target in self._moves:
                bits |= (bits >> target & 1) << source
        return bits


@dataclass(frozen=True, slots=True)
class Liveness:
    """Live groups.

    Attributes:
        at_start: The groups live before the first instruction.
        after: For each chain and instruction, the groups live after it.
        kept: The groups that keep their bytes from call to call.
    """

    at_start: Bits
    after: list[list[Bits]]
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
        live = groups.bits(outputs) | kept
        after: list[list[Bits]] = []
        for chain in reversed(chains):
            before = _before(chain, groups, live)
            after.insert(0, [_any(before, targets) for targets in chain.follow])
            _keep_rows(chain, groups, after[0])
            live = before[0]
        all_kept = kept | live & ~from_caller
        if all_kept == kept:
            held = {bits: groups.with_moved(bits) for bits in {b for row in after for b in row}}
            after = [[held[bits] for bits in row] for row in after]
            return Liveness(groups.with_moved(live), after, kept)
        kept = all_kept


def _before(chain: BoundChain, groups: Groups, at_end: Bits) -> list[Bits]:
    """Return the groups live before each instruction, and at the end."""
    effects = [
        (groups.bits(item.reads), groups.renewed(item.overwrites)) for item in chain.instructions
    ]
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


def _keep_rows(chain: BoundChain, groups: Groups, after: list[Bits]) -> None:
    """Mark the rows of earlier iterations as live in the loop around an ``et_copy_index``.

    It writes one row in each iteration; the memory is free again before the next loop over it.
    """
    loops = [
        (end - head, head, end)
        for end, targets in enumerate(chain.follow)
        for head in targets
        if head <= end
    ]
    for index, item in enumerate(chain.instructions):
        if item.name == COPY_INDEX:
            around = [loop for loop in loops if loop[1] <= index <= loop[2]]
            for _, head, end in sorted(around)[:1]:
                rows = groups.bits(item.writes) & after[end]
                for inside in range(head, end):
                    after[inside] |= rows


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
