"""Poison: fill dead bytes, so that a read of them gives NaN.

While the method runs, the bytes of a value are filled with 0xFF (NaN for floats) as soon as it
is dead, so that a program which reads dead memory gives NaN and not, by luck, the right number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lowerdeck.runner.instructions import BoundChain, Step
from lowerdeck.runner.memory.aliases import find_aliases
from lowerdeck.runner.memory.liveness import Bits, Groups, analyse, members
from lowerdeck.runner.memory.ranges import Range, overlap
from lowerdeck.runner.values.arena import POISON, Arena
from lowerdeck.runner.values.frame import Frame
from lowerdeck.runner.values.tensors import Origin, TensorSpec


class Poison:
    """Fill the dead bytes of one method.

    Args:
        ties: The views and the moves of its code, as pairs of values (from, to).
        inputs: The inputs of the method.
        outputs: The outputs of the method.
    """

    def __init__(
        self,
        frame: Frame,
        chains: Sequence[BoundChain],
        ties: tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]],
        arenas: Sequence[Arena],
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        self._arenas = arenas
        state = [i for i, spec in enumerate(frame.specs) if spec is not None and spec.has_state]
        views, moves = ties
        groups = Groups(len(frame.specs), views, moves)
        live = analyse(chains, groups, inputs=inputs, outputs=outputs, state=state)
        unwritten = {
            index
            for index, spec in enumerate(frame.specs)
            if spec is not None and not spec.has_state and live.kept >> groups.of(index) & 1
        }
        aliases = find_aliases(
            chains, frame.specs, inputs=inputs, outputs=outputs, unwritten=unwritten
        )
        groups = self._groups = Groups(len(frame.specs), [*views, *aliases], moves)
        self._ranges: dict[int, list[Range]] = {}
        for index, spec in enumerate(frame.specs):
            if spec is not None and spec.origin is Origin.PLANNED:
                self._ranges.setdefault(groups.of(index), []).append(_range(spec))
        self._liveness = analyse(chains, groups, inputs=inputs, outputs=outputs, state=state)
        self._at_start = self._views(self._everything(), self._liveness.kept)

    def poisoned(self, chains: Sequence[BoundChain]) -> list[BoundChain]:
        """Return ``chains`` with steps that also poison the values that die at them.

        Args:
            chains: The chains passed to the constructor.
        """
        return [self._poisoned_chain(number, chain) for number, chain in enumerate(chains)]

    def start(self) -> None:
        """Poison all planned memory except for values kept from call to call."""
        for view in self._at_start:
            view.fill_(POISON)

    def _poisoned_chain(self, number: int, chain: BoundChain) -> BoundChain:
        steps = []
        for index, step in enumerate(chain.steps):
            item, after = chain.instructions[index], self._liveness.after[number][index]
            touched = self._groups.bits((*item.reads, *item.writes))
            needed = after | self._liveness.kept
            dead = [r for group in members(touched & ~needed) for r in self._ranges.get(group, ())]
            views = self._views(dead, needed)
            steps.append(_PoisoningStep(step, views) if views else step)
        return BoundChain(tuple(steps), chain.instructions, chain.follow, chain.jumps)

    def _everything(self) -> list[Range]:
        return [
            (number, 0, arena.size)
            for number, arena in enumerate(self._arenas)
            if not arena.shared  # it also contains the state of other methods
        ]

    def _views(self, ranges: Iterable[Range], needed: Bits) -> list[torch.Tensor]:
        """Return the bytes of ``ranges`` that no group of ``needed`` uses."""
        busy = [r for group in members(needed) for r in self._ranges.get(group, ())]
        return [
            self._arenas[memory].bytes[start:end]
            for range_ in ranges
            for memory, start, end in _without(range_, busy)
        ]


def _range(spec: TensorSpec) -> Range:
    return spec.memory_id, spec.offset, spec.offset + spec.nbytes


def _without(one: Range, others: Iterable[Range]) -> list[Range]:
    """Return the parts of ``one`` outside of ``others``."""
    memory, start, end = one
    left = []
    for _, first, last in sorted(other for other in others if overlap(one, other)):
        if first > start:
            left.append((memory, start, first))
        start = max(start, last)
    if start < end:
        left.append((memory, start, end))
    return left


class _PoisoningStep:
    """Run a step, then poison the values that are dead after it."""

    def __init__(self, body: Step, views: Sequence[torch.Tensor]) -> None:
        self.body = body
        self._views = views

    def __call__(self) -> int | None:
        target = self.body()
        self.finish()
        return target

    def finish(self) -> None:
        """Poison the dead values."""
        for view in self._views:
            view.fill_(POISON)
