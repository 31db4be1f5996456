"""Views that provide memory at run time, and the instructions up to which that memory is valid.

``executorch_prim::et_view.default(source, sizes, out)`` makes ``out`` point at the bytes of
``source``. If the caller provides an input's memory, a view of it has no planned bytes: before the
view is taken, the tensor is a null pointer, which a kernel would dereference.
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
        step: Index of the view's instruction.
        end: Up to this instruction every path includes the view.
        source: The base tensor.
        out: The view.
    """

    step: int
    end: int
    source: int
    out: int


def views_of(chain: schema.Chain, operators: Sequence[schema.Operator]) -> Iterator[View]:
    """Yield the views of a chain in order.

    Args:
        chain: The chain; its indices may be invalid.
        operators: The operators of its method.
    """
    calls = [step.instr_args for step in chain.instructions]
    jumps = [
        (number, call.destination_instruction)
        for number, call in enumerate(calls)
        if isinstance(call, schema.JumpFalseCall)
    ]
    back = sorted(target for number, target in jumps if target <= number)
    # Targets of jumps that skip this instruction.
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
                # A backward jump from a later instruction may enter between the view and its use.
                after = bisect_right(back, number)
                end = min([landings[0], *back[after : after + 1]])
            yield View(number, end, call.args[_SOURCE], call.args[_OUT])
