"""Lifetimes of views: values without an instruction that alias other values.

A view that shares the bytes of its source has no instruction in the file. It is live from the
write of its source. If a source is inside a larger view (a part of a concatenation), it is live
until the view's last read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from lowerdeck.serializer import (
    DelegateCall,
    ExecutionPlan,
    KernelCall,
    MoveCall,
    OptionalTensorList,
    Tensor,
    TensorList,
)


@dataclass(frozen=True, slots=True)
class Write:
    """A byte range written by a value.

    Attributes:
        end: End of the range, exclusive.
        value: Index of the value.
        time: Index of the instruction.
    """

    start: int
    end: int
    value: int
    time: int


def join_views(
    plan: ExecutionPlan, first: MutableMapping[int, int], last: MutableMapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Extend lifetimes of views and of their sources, in place.

    Args:
        first: Index of the first instruction that reads or writes each value.
        last: Index of the last instruction that reads or writes each value.

    Returns:
        For each value that is read but never written, the values that wrote its bytes.
    """
    sources: dict[int, tuple[int, ...]] = {}
    memories: dict[int, Memory] = {}
    written: set[int] = set()
    unfolded = _Unfolded(plan)

    def write(value: int, time: int) -> None:
        planned = _memory_range(plan, value)
        if planned is not None:
            memory, start, end = planned
            memories.setdefault(memory, Memory()).write(Write(start, end, value, time))
        written.add(value)

    for value in plan.inputs:
        write(value, 0)
    for time, read, results in _accesses(plan, first, last, unfolded):
        for value in read:
            if value in written:
                continue
            written.add(value)
            planned = _memory_range(plan, value)
            if planned is None or planned[0] not in memories:
                continue
            _, start, end = planned
            writes = list(unfolded.first_of(memories[planned[0]].inside(start, end)))
            sources[value] = tuple(dict.fromkeys(source.value for source in writes))
            for source in writes:
                if source.start <= start and end <= source.end:
                    first[value] = min(first[value], source.time)
                else:
                    last[source.value] = max(last[source.value], time)
        for value in results:
            write(value, time)
    return sources


class Memory:
    """Interval map of the last write of each byte; each interval ends where the next begins."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._writes: list[Write | None] = []

    def inside(self, start: int, end: int) -> Iterator[Write]:
        """Yield the last writes of the bytes in a range; a write that was split is repeated.

        Args:
            end: End of the range, exclusive.
        """
        at = max(bisect_right(self._starts, start) - 1, 0)
        while start < end and at < len(self._starts) and self._starts[at] < end:
            write = self._writes[at]
            if write is not None:
                yield write
            at += 1

    def write(self, write: Write) -> None:
        """Record a write, replacing earlier writes in its range."""
        if write.start < write.end:
            low, high = self._cut(write.start), self._cut(write.end)
            self._starts[low:high] = [write.start]
            self._writes[low:high] = [write]

    def _cut(self, at: int) -> int:
        """Split the interval at a byte and return the index of the interval that starts there."""
        number = bisect_left(self._starts, at)
        if self._starts[number : number + 1] != [at]:
            self._starts.insert(number, at)
            self._writes.insert(number, self._writes[number - 1] if number else None)
        return number


def _accesses(
    plan: ExecutionPlan,
    first: Mapping[int, int],
    last: Mapping[int, int],
    unfolded: _Unfolded,
) -> Iterable[tuple[int, list[int], list[int]]]:
    """Yield the index, the read tensors and the written tensors of each instruction."""
    results = set(plan.outputs)
    time = 0
    for chain in plan.chains:
        for instruction in chain.instructions:
            match instruction.instr_args:
                case KernelCall(_, args):
                    count = result_count(plan, args)
                    yield (
                        time,
                        unfolded.tensors(args[: len(args) - count]),
                        unfolded.tensors(args[len(args) - count :]),
                    )
                case DelegateCall(_, args):
                    # The file does not separate inputs from outputs: a value that is first used
                    # here and read later is an output.
                    outputs = [
                        arg
                        for arg in args
                        if first[arg] == time and (last[arg] > time or arg in results)
                    ]
                    yield time, [arg for arg in args if arg not in outputs], outputs
                case MoveCall(source, target):
                    yield time, [source], [target]
            time += 1
    # An output may also be a view: the caller reads it after the last instruction.
    yield max(time - 1, 0), unfolded.tensors(plan.outputs), []


class _Unfolded:
    """Expander of lists and ranges, up to a limit.

    In a malicious file many calls may share a long list, and many views a range with many writes,
    which would take quadratic time. Beyond the limit a list counts as one value and a range as
    unwritten: lifetimes are then approximate.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        size = len(plan.values)
        for chain in plan.chains:
            for step in chain.instructions:
                call = step.instr_args
                size += len(call.args) if isinstance(call, KernelCall | DelegateCall) else 2
        self._left = _MOST_UNFOLDED * size

    def tensors(self, values: Iterable[int]) -> list[int]:
        """Return values with lists replaced by their members."""
        indices: list[int] = []
        for value in values:
            members = list_members(self._plan, value)
            if members and len(members) <= self._left:
                self._left -= len(members)
                indices += members
            else:
                indices.append(value)
        return indices

    def first_of(self, writes: Iterator[Write]) -> Iterator[Write]:
        """Yield writes up to the limit."""
        for write in writes:
            self._left -= 1
            if self._left < 0:
                return
            yield write


_MOST_UNFOLDED = 8  # times the number of values and arguments


def _memory_range(plan: ExecutionPlan, index: int) -> tuple[int, int, int] | None:
    """Return the memory id, start and end of a planned tensor."""
    if not 0 <= index < len(plan.values):
        return None
    tensor = plan.values[index].val
    if not isinstance(tensor, Tensor) or tensor.allocation_info is None:
        return None
    start = tensor.allocation_info.memory_offset
    return tensor.allocation_info.memory_id, start, start + tensor.nbytes


def result_count(plan: ExecutionPlan, args: Sequence[int]) -> int:
    """Return the number of a kernel's results, which are its last arguments.

    The last argument is the return value. The out arguments before it are the same value, or the
    members of a list; an in-place kernel has no out arguments.

    Args:
        args: Value indices of the call's arguments.
    """
    if not args:
        return 0
    members = list_members(plan, args[-1]) or (args[-1],)
    # A list with more members than the call has arguments is skipped: it may be long.
    if len(members) >= len(args):
        return 1
    before = args[-1 - len(members) : -1]
    return 1 + len(members) if list(before) == list(members) else 1


def list_members(plan: ExecutionPlan, index: int) -> Sequence[int]:
    """Return the values in a list of tensors; none for any other value.

    Args:
        index: Index of the value; may be out of range.
    """
    if 0 <= index < len(plan.values):
        value = plan.values[index].val
        if isinstance(value, TensorList | OptionalTensorList):
            return value.items
    return ()
