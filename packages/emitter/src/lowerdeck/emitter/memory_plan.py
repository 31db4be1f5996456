"""Decide where in planned memory every storage lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowerdeck.emitter.instructions import Code
from lowerdeck.emitter.states import StatePool
from lowerdeck.emitter.values import Role, Storage, TensorValue

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A storage and the steps during which its bytes matter.

    Attributes:
        storage: The storage.
        nbytes: Its size, rounded up to the alignment.
        first: First step, -1 for what is there before the method starts.
        last: Last step, the number of steps for what must outlive the method.
    """

    storage: Storage
    nbytes: int
    first: int
    last: int


def lifetimes(code: Code, *, alignment: int = ALIGNMENT) -> list[Lifetime]:
    """Return the lifetime of every storage that needs planned memory.

    Args:
        code: The steps of a method.
        alignment: Every size is rounded up to a multiple of this many bytes.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    end = len(code.steps)
    for value in code.inputs:
        if isinstance(value, TensorValue) and value.storage is not None:
            first[id(value.storage)] = last[id(value.storage)] = -1
    for index, step in enumerate(code.steps):
        for value in (*step.reads, *step.writes):
            first.setdefault(id(value.storage), index)
            last[id(value.storage)] = index
    for value in code.outputs:
        if isinstance(value, TensorValue):
            first.setdefault(id(value.storage), end)
            last[id(value.storage)] = end
    _stretch_over_loops(code, first, last)
    planned = (Role.ACTIVATION, Role.INPUT, Role.OUTPUT)
    return [
        Lifetime(storage, _rounded(storage.nbytes, alignment), first[key], last[key])
        for storage in code.storages
        if storage.role in planned and (key := id(storage)) in first
    ]


def _stretch_over_loops(code: Code, first: dict[int, int], last: dict[int, int]) -> None:
    for loop in code.loops:
        touched = {
            id(value.storage)
            for step in code.steps[loop.first : loop.last + 1]
            for value in (*step.reads, *step.writes)
        }
        for key in touched:
            if first[key] < loop.first:
                # Read or carried by the next turn, too.
                last[key] = max(last[key], loop.last)
            elif last[key] > loop.last:
                # Filled turn by turn and read behind the loop.
                first[key] = loop.first


def _rounded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def place(lives: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each lifetime and the memory that they need together."""
    order = sorted(range(len(lives)), key=lambda i: (-lives[i].nbytes, lives[i].first))
    offsets = [0] * len(lives)
    placed: list[int] = []
    total = 0
    for index in order:
        life = lives[index]
        taken = sorted(
            (offsets[other], offsets[other] + lives[other].nbytes)
            for other in placed
            if lives[other].first <= life.last and life.first <= lives[other].last
        )
        best, best_gap, cursor = -1, -1, 0
        for start, stop in taken:
            gap = start - cursor
            if gap >= life.nbytes and (best < 0 or gap < best_gap):
                best, best_gap = cursor, gap
            cursor = max(cursor, stop)
        offsets[index] = cursor if best < 0 else best
        placed.append(index)
        total = max(total, offsets[index] + life.nbytes)
    return offsets, total


def plan_memory(code: Code, states: StatePool) -> list[int]:
    """Place every storage of ``code``; return the size of each planned memory.

    Args:
        code: The steps of a method.
        states: The mutable buffers of the program, added to.

    Returns:
        Sizes in bytes by memory id; entry 0 is reserved.
    """
    lives = lifetimes(code)
    offsets, total = place(lives)
    for life, offset in zip(lives, offsets, strict=True):
        life.storage.memory_id, life.storage.offset = 1, offset
    sizes = [0, total]
    for state in code.states:
        if state.storage is not None:
            state.storage.memory_id = 2
            state.storage.offset = states.place(state.key, state.storage)
    return [*sizes, states.size] if code.states else sizes
