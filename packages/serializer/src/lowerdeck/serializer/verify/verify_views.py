"""Tensors that get their memory from a view of another one, and the steps that have it.

``executorch_prim::et_view.default(source, sizes, out)`` lets ``out`` point at the bytes of
``source``. A compiler that leaves an input's memory to the caller gives a view of it no bytes of
its own: before the view is taken, the tensor is a null pointer, and a kernel would follow it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from lowerdeck.serializer.pte import schema

VIEW = "executorch_prim::et_view.default"
_SOURCE, _OUT = 0, 2


class View(NamedTuple):
    """One view in a chain.

    Attributes:
        step: Number of its instruction.
        end: Up to this instruction no way leads past the view.
        source: The tensor that it is of.
        out: The tensor that it gives memory.
    """

    step: int
    end: int
    source: int
    out: int


def views_of(chain: schema.Chain, operators: Sequence[schema.Operator]) -> Iterator[View]:
    """Yield the views of a chain in order.

    Args:
        chain: The chain; indices in it may lead nowhere.
        operators: The operators of its method.
    """
    calls = [step.instr_args for step in chain.instructions]
    jumps = [
        (number, call.destination_instruction)
        for number, call in enumerate(calls)
        if isinstance(call, schema.JumpFalseCall)
    ]
    back = sorted(target for number, target in jumps if target <= number)
    # Where jumps from before this instruction land after it: they pass it by.
    landings: list[int] = []
    for number, call in enumerate(calls):
        while landings and landings[0] <= number:
            heappop(landings)
        if isinstance(call, schema.JumpFalseCall):
            heappush(landings, call.destination_instruction)
        if not isinstance(call, schema.KernelCall) or len(call.args) <= _OUT:
            continue
        if 0 <= call.op_index < len(operators) and operators[call.op_index].full_name == VIEW:
            end = len(calls)
            if landings:
                # Having passed it by, one may come back to between the view and its use.
                after = bisect_right(back, number)
                end = min([landings[0], *back[after : after + 1]])
            yield View(number, end, call.args[_SOURCE], call.args[_OUT])
