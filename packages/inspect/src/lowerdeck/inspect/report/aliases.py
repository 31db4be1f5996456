"""Lifetimes of views: values without an instruction that share bytes of other values.

A compiler that lets a view share the bytes of its source leaves no instruction for it in the
file. Its bytes are needed from when the source was written; and those of a source that a larger
view holds (the parts of a concatenation) until the view is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from lowerdeck.inspect.report.results import list_members, result_count
from lowerdeck.serializer import (
    DelegateCall,
    ExecutionPlan,
    KernelCall,
    MoveCall,
    Tensor,
)


@dataclass(frozen=True, slots=True)
class Write:
    """A run of bytes that a value wrote.

    Attributes:
        end: The byte after the last.
        value: Index of the value.
        time: Number of the instruction.
    """

    start: int
    end: int
    value: int
    time: int


def join_views(
    plan: ExecutionPlan, first: MutableMapping[int, int], last: MutableMapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Lengthen lifetimes by the time that bytes wait for a view to be read, in place.

    Args:
        first: First touch of each value.
        last: Last touch of each value.

    Returns:
        For each value that is read and that nothing wrote the values that wrote its bytes.
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
    """The last write of each byte, as ordered runs; each run ends where the next begins."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._writes: list[Write | None] = []

    def inside(self, start: int, end: int) -> Iterator[Write]:
        """Yield the writes that left bytes in a range; one that was cut apart comes again.

        Args:
            end: The byte after the last.
        """
        at = max(bisect_right(self._starts, start) - 1, 0)
        while start < end and at < len(self._starts) and self._starts[at] < end:
            write = self._writes[at]
            if write is not None:
                yield write
            at += 1

    def write(self, write: Write) -> None:
        """Let a write replace what its range holds."""
        if write.start < write.end:
            low, high = self._cut(write.start), self._cut(write.end)
            self._starts[low:high] = [write.start]
            self._writes[low:high] = [write]

    def _cut(self, at: int) -> int:
        """Let a run begin at a byte and return its number."""
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
    """Yield for each instruction its number, the tensors that it reads and those it writes."""
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
                    # The file does not say where inputs end: what is new here and wanted later
                    # is a result.
                    outputs = [
                        arg
                        for arg in args
                        if first[arg] == time and (last[arg] > time or arg in results)
                    ]
                    yield time, [arg for arg in args if arg not in outputs], outputs
                case MoveCall(source, target):
                    yield time, [source], [target]
            time += 1
    # A result may also be a view: the caller reads it after the last step.
    yield max(time - 1, 0), unfolded.tensors(plan.outputs), []


class _Unfolded:
    """Counts what lists and ranges unfold to, up to a limit far above that of valid methods.

    Many calls may take one long list, and many views one finely written range: their product
    grows with the square of the file. Past the limit a list counts as one value and a range as
    untouched: the picture of such a file is coarser, and its time stays in proportion.
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
        """Return values with lists replaced by what they hold."""
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
        """Yield writes for as long as the limit allows."""
        for write in writes:
            self._left -= 1
            if self._left < 0:
                return
            yield write


_MOST_UNFOLDED = 8


def _memory_range(plan: ExecutionPlan, index: int) -> tuple[int, int, int] | None:
    """Return memory, first byte and end of a planned tensor."""
    if not 0 <= index < len(plan.values):
        return None
    tensor = plan.values[index].val
    if not isinstance(tensor, Tensor) or tensor.allocation_info is None:
        return None
    start = tensor.allocation_info.memory_offset
    return tensor.allocation_info.memory_id, start, start + tensor.nbytes
