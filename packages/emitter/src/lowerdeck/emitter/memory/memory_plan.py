"""Memory planning: assign a memory and an offset to each storage, and check them.

A planner is any function from a :class:`PlanRequest` to one :class:`Place` for each lifetime. The
default one uses a single memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lowerdeck.emitter.errors import MemoryPlanError
from lowerdeck.emitter.frontend.states import StatePool
from lowerdeck.emitter.ir.instructions import Code
from lowerdeck.emitter.memory.lifetimes import Lifetime, lifetimes
from lowerdeck.emitter.memory.placement import best_fit

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a storage.

    Attributes:
        memory_id: Id of the planned memory, from 1.
        offset: Offset in bytes, a multiple of the alignment.
    """

    memory_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Input of a planner.

    Attributes:
        method: Name of the method.
        lives: The storages, with sizes rounded up to the alignment.
        alignment: Every offset must be a multiple of this many bytes.
    """

    method: str
    lives: tuple[Lifetime, ...]
    alignment: int = ALIGNMENT


MemoryPlanner: TypeAlias = Callable[[PlanRequest], Sequence[Place]]
"""Returns one place for each lifetime of the request, in the same order."""


def one_memory(request: PlanRequest) -> list[Place]:
    """Place all storages in a single memory with :func:`best_fit`."""
    offsets, _ = best_fit(request.lives)
    return [Place(1, offset) for offset in offsets]


def plan_memory(code: Code, planner: MemoryPlanner) -> list[int]:
    """Place the storages of ``code`` except mutable buffers; return the memory sizes.

    Sets ``memory_id`` and ``offset`` of the storages.

    Args:
        planner: Places the activations, inputs and outputs.

    Returns:
        Size in bytes of each memory by its id; entry 0 is reserved and 0.

    Raises:
        MemoryPlanError: If the planner's result is invalid, such as two live storages that
            overlap.
    """
    lives = lifetimes(code, ALIGNMENT)
    request = PlanRequest(code.name, tuple(lives))
    places = list(planner(request))
    check_plan(request, places)
    sizes = [0] * (max((place.memory_id for place in places), default=1) + 1)
    for life, place in zip(lives, places, strict=True):
        life.storage.memory_id, life.storage.offset = place.memory_id, place.offset
        sizes[place.memory_id] = max(sizes[place.memory_id], place.offset + life.nbytes)
    return sizes


def with_state(
    sizes: Sequence[int], code: Code, states: StatePool, memory_id: int
) -> Sequence[int]:
    """Place mutable buffers in a memory; return the sizes of all memories.

    Args:
        sizes: The sizes of the other memories.
        states: The program's mutable buffers; extended.
        memory_id: Id of their memory, the same in all methods and above the ids of all plans.
    """
    if not code.states:
        return sizes
    for state in code.states:
        if state.storage is not None:
            state.storage.memory_id = memory_id
            state.storage.offset = states.place(state.key, state.storage)
    unused = [0] * (memory_id - len(sizes))
    return [*sizes, *unused, states.size]


def check_plan(request: PlanRequest, places: Sequence[Place]) -> None:
    """Check that no two storages overlap in memory while both are live.

    Args:
        request: The storages to place.
        places: One place for each lifetime.

    Raises:
        MemoryPlanError: The number of places is wrong, one is malformed, or two overlap.
    """
    lives = request.lives
    if len(places) != len(lives):
        raise MemoryPlanError(
            f"method {request.method!r}: the planner returned {len(places)} places, expected "
            f"{len(lives)}, one for each lifetime"
        )
    for life, place in zip(lives, places, strict=True):
        if place.memory_id < 1 or place.offset < 0 or place.offset % request.alignment:
            raise MemoryPlanError(
                f"method {request.method!r}: {life.storage.name!r} is placed at {place}; expected "
                f"a memory_id from 1 and an offset that is a multiple of {request.alignment}"
            )
    _sweep(request, places)


def _sweep(request: PlanRequest, places: Sequence[Place]) -> None:
    """Sweep through the steps with live storages sorted by place; neighbours must not overlap."""
    lives = request.lives
    events = sorted(
        [(life.first, 1, i) for i, life in enumerate(lives)]
        # A storage is live in its last step: remove it after the insertions of that step.
        + [(life.last, 2, i) for i, life in enumerate(lives)]
    )
    live: list[tuple[int, int, int, int]] = []
    for _, kind, index in events:
        place, size = places[index], lives[index].nbytes
        entry = (place.memory_id, place.offset, place.offset + size, index)
        if size == 0:
            continue
        if kind == 2:
            live.pop(bisect_left(live, entry))
            continue
        at = bisect_left(live, entry)
        for other in live[max(at - 1, 0) : at + 1]:
            if other[0] == entry[0] and other[1] < entry[2] and entry[1] < other[2]:
                earlier, later = lives[other[3]], lives[index]
                raise MemoryPlanError(
                    f"method {request.method!r}: {earlier.storage.name!r} (steps "
                    f"{earlier.first} to {earlier.last}, {places[other[3]]}, {earlier.nbytes} "
                    f"bytes) and {later.storage.name!r} (steps {later.first} to {later.last}, "
                    f"{place}, {later.nbytes} bytes) overlap while both are live"
                )
        insort(live, entry)
