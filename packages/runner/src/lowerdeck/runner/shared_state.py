"""Memories of state that the methods of a program share."""

from __future__ import annotations

from collections.abc import Sequence

from lowerdeck.runner.errors import MemoryPlanError
from lowerdeck.serializer import ExecutionPlan, Tensor


def state_memories(plans: Sequence[ExecutionPlan]) -> dict[int, int]:
    """Return the sizes of memories that contain only state in all methods, by memory id.

    State has a name or an initial value. Methods share these memories, so that one can fill a
    cache that another reads. Other memories are private to a method, so that its intermediate
    results cannot overwrite the state of another.
    """
    sizes: dict[int, int] = {}
    mixed: set[int] = set()
    for plan in plans:
        for number, size in enumerate(plan.non_const_buffer_sizes):
            sizes[number] = max(size, sizes.get(number, 0))
        for value in plan.values:
            tensor = value.val
            if not isinstance(tensor, Tensor) or tensor.allocation_info is None:
                continue
            if not _name(tensor) and not tensor.data_buffer_idx:
                mixed.add(tensor.allocation_info.memory_id)
    return {number: size for number, size in sizes.items() if number and number not in mixed}


def check_offsets(plans: Sequence[ExecutionPlan], memories: dict[int, int]) -> None:
    """Reject methods with different offsets for one state, or overlapping states.

    Args:
        memories: Sizes of shared memories by id.

    Raises:
        MemoryPlanError: The offsets of two methods conflict.
    """
    # Longest first: later values of a name are views of the state.
    placed = sorted(
        (
            (
                tensor.allocation_info.memory_id,
                tensor.allocation_info.memory_offset,
                -tensor.nbytes,
                _name(tensor),
                plan.name,
            )
            for plan in plans
            for tensor in (value.val for value in plan.values)
            if isinstance(tensor, Tensor) and tensor.allocation_info is not None
            if tensor.allocation_info.memory_id in memories and _name(tensor) and tensor.nbytes
        ),
    )
    places: dict[str, tuple[int, int, int, str]] = {}
    last = (-1, 0, 0, "", "")
    for memory, start, size, name, method in placed:
        end = start - size
        place = places.setdefault(name, (memory, start, end, method))
        if place[0] != memory or not place[1] <= start <= end <= place[2]:
            _disagree(f"{name!r} has a different location than in method {place[3]!r}", method)
        if last[0] == memory and start < last[2] and name != last[3]:
            _disagree(f"{name!r} overlaps {last[3]!r} of method {last[4]!r}", method)
        if last[0] != memory or end > last[2]:
            last = (memory, start, end, name, method)


def _disagree(problem: str, method: str) -> None:
    raise MemoryPlanError(f"method {method!r}: the state {problem}; the memory plan is broken")


def _name(tensor: Tensor) -> str:
    extra = tensor.extra_tensor_info
    return (extra.fully_qualified_name or "") if extra is not None else ""
