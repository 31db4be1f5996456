"""Liveness analysis of planned values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lowerdeck.runner.instructions import BoundChain
from lowerdeck.runner.operators.kernels import COPY_INDEX

Bits = int
"""A bit set of groups."""

Range = tuple[int, int, int]
"""Memory id, start and end (exclusive), in bytes."""


class Groups:
    """Values grouped by the memory that they use.

    A value and its aliases form one group; other values form singleton groups.

    Args:
        aliases: Pairs of values (base, alias).
        moves: Pairs of registers (from, to): ``to`` aliases ``from``.
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
        """Return the groups that a write of ``values`` overwrites completely."""
        return self.bits(index for index in values if index not in self._partial)

    def with_moved(self, bits: Bits) -> Bits:
        """Return ``bits`` and the groups that they may alias by moves."""
        former = -1
        while bits != former:
            former = bits
            for source, target in self._moves:
                bits |= (bits >> target & 1) << source
        return bits


class Liveness(NamedTuple):
    """Result of the liveness analysis.

    Attributes:
        at_start: Groups live before the first instruction.
        after: Groups live after each instruction, by chain.
        kept: Groups that are live across calls.
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
    """Return the live groups after each instruction.

    A value other than an input that is read before any write is state: its bytes come from the
    previous call.

    Args:
        inputs: Indices of the input values.
        outputs: Indices of the output values.
        state: Value indices of state declared by the file.
    """
    kept = groups.bits(state)
    from_caller = groups.bits(inputs)
    # Iterate to a fixed point: values read first in the next call are live at the end of this one.
    # It terminates, because ``kept`` only grows.
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
            aliased = {bits: groups.with_moved(bits) for bits in {b for row in after for b in row}}
            after = [[aliased[bits] for bits in row] for row in after]
            return Liveness(groups.with_moved(live), after, kept)
        kept = all_kept


def _before(chain: BoundChain, groups: Groups, at_end: Bits) -> list[Bits]:
    """Return the groups live before each instruction and at the end."""
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
    """Mark the result of ``et_copy_index`` as live in its innermost loop.

    Each iteration writes one row; earlier rows stay live until the loop ends.
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
    """Return the indices of the set bits in ascending order."""
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return numbers
