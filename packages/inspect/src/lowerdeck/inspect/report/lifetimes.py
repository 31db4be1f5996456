"""Liveness of the tensors in planned memory: offsets, and first and last use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lowerdeck.inspect.report.aliases import join_views
from lowerdeck.serializer import (
    DelegateCall,
    ExecutionPlan,
    FreeCall,
    InstructionArguments,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    OptionalTensorList,
    Tensor,
    TensorList,
)


class LiveRange(NamedTuple):
    """A tensor in planned memory, and the range of instructions in which it is live.

    Attributes:
        value: Index of the tensor among the values of the method.
        memory_id: Number of the planned memory.
        offset: Offset of the tensor in that memory, in bytes.
        nbytes: Size in bytes; for a dynamic shape its upper bound.
        start: Index of the first instruction that uses the tensor, or that wrote the bytes of a
            view; 0 for inputs and state.
        end: Index of the last instruction that uses it; the method's last for outputs and state.
        sources: For a view that no instruction creates, the tensors that wrote its bytes.
    """

    value: int
    memory_id: int
    offset: int
    nbytes: int
    start: int
    end: int
    sources: tuple[int, ...] = ()


def steps(plan: ExecutionPlan) -> Iterator[InstructionArguments]:
    """Yield the arguments of each instruction of a method, chain by chain."""
    for chain in plan.chains:
        for instruction in chain.instructions:
            yield instruction.instr_args


def columns_of(step: InstructionArguments) -> tuple[str, int, list[int]]:
    """Return an instruction's kind (a letter), callee or jump target (or -1), and values."""
    match step:
        case KernelCall(operator, args):
            return "k", operator, args
        case DelegateCall(delegate, args):
            return "d", delegate, args
        case MoveCall(source, target):
            return "m", -1, [source, target]
        case JumpFalseCall(condition, destination):
            return "j", destination, [condition]
        case FreeCall(value):
            return "f", -1, [value]


def callee(plan: ExecutionPlan, step: InstructionArguments) -> str | None:
    """Return the name of the operator or delegate that an instruction calls.

    Args:
        step: The instruction; its index may be out of range.

    Returns:
        The full name of the operator, or ``delegate`` with the backend; None for other
        instructions.
    """
    match step:
        case KernelCall(index, _):
            in_range = 0 <= index < len(plan.operators)
            return plan.operators[index].full_name if in_range else f"operator {index}"
        case DelegateCall(index, _):
            in_range = 0 <= index < len(plan.delegates)
            return f"delegate {plan.delegates[index].id if in_range else index}"
    return None


def live_ranges(plan: ExecutionPlan) -> list[LiveRange]:
    """Return the live range of each tensor of ``plan`` in planned memory.

    A live range spans the first to the last instruction that uses the tensor, directly or through
    a list or a moved handle; the live range of a view starts when its bytes are written. A tensor
    that is live when a loop starts stays live until the loop ends. Tensors with a name or an
    initial value are state, which is live during the whole method.

    Returns:
        The ranges in order of value index; unused tensors have none.
    """
    uses = _Uses(plan)
    return [
        LiveRange(
            index,
            tensor.allocation_info.memory_id,
            tensor.allocation_info.memory_offset,
            tensor.nbytes,
            start,
            max(start, end),
            uses.sources.get(index, ()),
        )
        for index, tensor, (start, end) in uses.spans()
        if tensor.allocation_info is not None
    ]


def is_state(tensor: Tensor) -> bool:
    """Return whether a tensor in planned memory keeps its value between runs."""
    named = tensor.extra_tensor_info is not None and bool(
        tensor.extra_tensor_info.fully_qualified_name
    )
    return tensor.allocation_info is not None and (named or tensor.data_buffer_idx > 0)


class _Uses:
    """First and last use of each value, collected in one pass over the instructions.

    Attributes:
        sources: The values that wrote the bytes of each view.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        moves: list[tuple[int, int]] = []
        loops: list[tuple[int, int]] = []
        count = chain_start = 0
        for value in plan.inputs:
            self._touch(value, 0)
        for chain in plan.chains:
            for instruction in chain.instructions:
                self._touch_all(columns_of(instruction.instr_args)[2], count)
                match instruction.instr_args:
                    case MoveCall(source, target):
                        moves.append((source, target))
                    case JumpFalseCall(_, destination) if destination + chain_start <= count:
                        loops.append((destination + chain_start, count))
                count += 1
            chain_start = count
        self._end = max(count - 1, 0)
        for value in plan.outputs:
            self._touch(value, self._end)
        # The bytes of a moved handle are read when its target is read.
        for source, target in reversed(moves):
            self._touch(source, self._last[target])
        self._spread_lists()
        self.sources = join_views(plan, self._first, self._last)
        self._spread_loops(_merged(loops))

    def spans(self) -> Iterator[tuple[int, Tensor, tuple[int, int]]]:
        """Yield index, tensor, and first and last use of every tensor that is used or is state."""
        for index, evalue in enumerate(self._plan.values):
            if not isinstance(evalue.val, Tensor):
                continue
            if is_state(evalue.val):
                yield index, evalue.val, (0, self._end)
            elif index in self._first:
                yield index, evalue.val, (self._first[index], self._last[index])

    def _touch(self, value: int, time: int) -> None:
        self._first.setdefault(value, time)
        if self._first[value] > time:
            self._first[value] = time
        if self._last.get(value, -1) < time:
            self._last[value] = time

    def _touch_all(self, values: Iterable[int], time: int) -> None:
        first, last = self._first, self._last
        for value in values:
            first.setdefault(value, time)
            last[value] = time

    def _spread_lists(self) -> None:
        # Once per list, not per use: a list may be long and used often.
        for index, evalue in enumerate(self._plan.values):
            if isinstance(evalue.val, TensorList | OptionalTensorList) and index in self._first:
                for member in evalue.val.items:
                    self._touch(member, self._first[index])
                    self._touch(member, self._last[index])

    def _spread_loops(self, loops: Sequence[tuple[int, int]]) -> None:
        starts = [start for start, _ in loops]
        for value, last in self._last.items():
            at = bisect_right(starts, last) - 1
            if at >= 0 and self._first[value] < starts[at] and last < loops[at][1]:
                self._last[value] = loops[at][1]


def _merged(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join loops that overlap, so that each instruction is in at most one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(loops):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
