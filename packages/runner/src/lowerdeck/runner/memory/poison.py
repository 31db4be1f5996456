"""Fill dead bytes, so that reading them gives NaN.

The bytes of a value are filled with 0xFF (NaN for floats) as soon as it is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lowerdeck.runner.instructions import BoundChain, Step
from lowerdeck.runner.memory.liveness import Bits, Range, members
from lowerdeck.runner.memory.overlaps import MemoryPlan, overlap
from lowerdeck.runner.values.arena import POISON, Arena


class Poison:
    """Fill the dead bytes of one method."""

    def __init__(
        self, plan: MemoryPlan, chains: Sequence[BoundChain], arenas: Sequence[Arena]
    ) -> None:
        self._arenas = arenas
        self._ranges: dict[int, list[Range]] = {}
        for index, range_ in plan.ranges.items():
            self._ranges.setdefault(plan.groups.of(index), []).append(range_)
        kept = plan.liveness.kept
        # Shared arenas also hold the state of other methods.
        everything = [(i, 0, arena.size) for i, arena in enumerate(arenas) if not arena.shared]
        self._at_start = self._views(everything, kept)
        self._after: list[list[list[torch.Tensor]]] = []
        for chain, after in zip(chains, plan.liveness.after, strict=True):
            views = []
            for item, live in zip(chain.instructions, after, strict=True):
                touched = plan.groups.with_moved(plan.groups.bits((*item.reads, *item.writes)))
                needed = live | kept
                views.append(self._views(self._ranges_of(touched & ~needed), needed))
            self._after.append(views)

    def start(self) -> None:
        """Poison all planned memory except state."""
        for view in self._at_start:
            view.fill_(POISON)

    def run(self, chain: int, index: int, step: Step) -> int | None:
        """Run an instruction, then poison values that are dead after it."""
        target = step()
        self.finish(chain, index)
        return target

    def finish(self, chain: int, index: int) -> None:
        """Poison values that are dead after an instruction."""
        for view in self._after[chain][index]:
            view.fill_(POISON)

    def _ranges_of(self, groups: Bits) -> list[Range]:
        return [range_ for group in members(groups) for range_ in self._ranges.get(group, ())]

    def _views(self, ranges: Iterable[Range], needed: Bits) -> list[torch.Tensor]:
        """Return the bytes of ``ranges`` outside of the groups ``needed``."""
        busy = self._ranges_of(needed)
        return [
            self._arenas[memory].bytes[start:end]
            for range_ in ranges
            for memory, start, end in _without(range_, busy)
        ]


def _without(one: Range, others: Iterable[Range]) -> list[Range]:
    """Return the parts of ``one`` outside of ``others``."""
    memory, start, end = one
    parts = []
    for _, first, last in sorted(other for other in others if overlap(one, other)):
        if first > start:
            parts.append((memory, start, first))
        start = max(start, last)
    if start < end:
        parts.append((memory, start, end))
    return parts
