"""Lifetimes of storages, with control flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lowerdeck.emitter.ir.instructions import Code
from lowerdeck.emitter.ir.values import Role, Storage, TensorValue

Spans: TypeAlias = dict[Storage | None, int]
"""A step for each storage; not keyed by ``id``, which may be reused."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A storage and the steps during which its bytes are needed.

    Attributes:
        nbytes: Its size, rounded up to the alignment.
        first: First step, -1 for storages that exist before the method starts.
        last: Last step, the number of steps for storages that outlive the method.
    """

    storage: Storage
    nbytes: int
    first: int
    last: int


def spans(code: Code) -> tuple[Spans, Spans]:
    """Return the first and the last step of each storage.

    A storage that is live when a loop starts and used in it stays live until the loop ends. One
    that is first used in a loop and used after it is live from the start of the loop. Branches
    need no rule: only one of them runs.
    """
    first: Spans = {}
    last: Spans = {}
    end = len(code.steps)
    for value in code.inputs:
        if isinstance(value, TensorValue):
            first[value.storage] = last[value.storage] = -1
    for index, step in enumerate(code.steps):
        for value in (*step.reads, *step.writes):
            first.setdefault(value.storage, index)
            last[value.storage] = index
    for value in code.outputs:
        if isinstance(value, TensorValue):
            first.setdefault(value.storage, end)
            last[value.storage] = end
    for loop in code.loops:
        touched = {
            value.storage
            for step in code.steps[loop.start : loop.stop]
            for value in (*step.reads, *step.writes)
        }
        for key in touched:
            if first[key] < loop.start:
                last[key] = max(last[key], loop[-1])
            elif last[key] >= loop.stop:
                first[key] = loop.start
    return first, last


def lifetimes(code: Code, alignment: int) -> list[Lifetime]:
    """Return the lifetime of every storage to plan.

    Args:
        alignment: Multiple in bytes to which sizes are rounded up.
    """
    first, last = spans(code)
    planned = (Role.ACTIVATION, Role.INPUT)
    return [
        Lifetime(
            storage,
            -(-storage.nbytes // alignment) * alignment,
            first[storage],
            last[storage],
        )
        for storage in code.storages
        if storage.role in planned and storage in first
    ]


def most_live_bytes(lives: list[Lifetime]) -> int:
    """Return the largest sum of sizes live at one step, a lower bound for every plan.

    Args:
        lives: Lifetimes of one memory.
    """
    change: dict[int, int] = {}
    for life in lives:
        change[life.first] = change.get(life.first, 0) + life.nbytes
        change[life.last + 1] = change.get(life.last + 1, 0) - life.nbytes
    peak = current = 0
    for time in sorted(change):
        current += change[time]
        peak = max(peak, current)
    return peak
