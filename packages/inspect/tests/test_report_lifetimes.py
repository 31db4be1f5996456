"""Lifetimes of planned values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowerdeck.inspect.report.aliases import Memory, Write
from lowerdeck.inspect.report.lifetimes import LiveRange, live_ranges
from lowerdeck.serializer import (
    Bool,
    DelegateCall,
    InstructionArguments,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    TensorList,
)
from lowerdeck_files.programs import program, tensor


def planned(offset: int = 0, name: str | None = None, index: int = 0, *, floats: int = 4) -> Any:
    return tensor((floats,), at=offset, index=index, name=name)


def blocks(
    values: Sequence[Any],
    steps: Sequence[InstructionArguments],
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> list[LiveRange]:
    return live_ranges(program(values, *steps, inputs=inputs, outputs=outputs).execution_plan[0])


def spans(
    values: Sequence[Any],
    steps: Sequence[InstructionArguments],
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> dict[int, tuple[int, int]]:
    found = blocks(values, steps, inputs, outputs)
    return {block.value: (block.start, block.end) for block in found}


def call(*args: int, out: int) -> KernelCall:
    return KernelCall(0, [*args, out, out])


def kernel(*args: int) -> KernelCall:
    return KernelCall(0, list(args))


P, STATE = planned(), planned(name="cache")
# Nothing else in a test touches this offset.
OTHER = planned(1024)
WIDE, SECOND, THIRD, FOURTH = planned(floats=8), planned(16), planned(64), planned(128)
CASES: dict[str, tuple[Sequence[Any], Sequence[Any], dict[int, tuple[int, int]]]] = {
    "state lives all the time": ([STATE, P], [kernel(1, 1)] * 3, {0: (0, 2), 1: (0, 2)}),
    "initial values do": ([planned(index=1), P], [kernel(1, 1)] * 3, {0: (0, 2), 1: (0, 2)}),
    "members live as long as their list": (
        [P, P, TensorList([0, 1]), P],
        [kernel(0, 0), kernel(1, 1), kernel(2, 3)],
        {0: (0, 2), 1: (1, 2), 3: (2, 2)},
    ),
    "bytes under a moved handle as long as its new owner": (
        [P, tensor((4,)), P],
        [kernel(0, 0), MoveCall(0, 1), kernel(2, 2), kernel(1, 2)],
        {0: (0, 3)},
    ),
    "a loop keeps what it found when it began": (
        [P, P, Bool(True)],
        [kernel(0, 0), kernel(0, 1), kernel(1, 1), JumpFalseCall(2, 1), kernel(1, 1)],
        {0: (0, 3), 1: (1, 4)},
    ),
    # 1 is written at 0; 2 shares its bytes, without an instruction, and is read at 3.
    "a view is needed since its source was written": (
        [OTHER, P, P, THIRD, FOURTH],
        [call(0, out=1), call(0, out=3), call(3, out=3), call(2, out=4)],
        {2: (0, 3)},
    ),
    "a view of a part keeps the part alone": (
        [OTHER, WIDE, SECOND, THIRD],
        [call(0, out=1), call(1, out=3), call(3, out=3), call(2, out=3)],
        {1: (0, 1), 2: (0, 3)},
    ),
    "parts live until the view of them all is read": (
        [OTHER, P, SECOND, WIDE, THIRD],
        [call(0, out=1), call(0, out=2), call(0, out=4), call(3, out=4)],
        {1: (0, 3), 2: (1, 3), 3: (3, 3)},
    ),
    "memory that is used again is no view": (
        [OTHER, P, P, THIRD],
        [call(0, out=1), call(1, out=3), call(3, out=2), call(2, out=3)],
        {1: (0, 1), 2: (2, 3)},
    ),
    # 2 is a view, read by the delegate alone, 4 a result, in memory that is free again.
    "a delegate makes what is wanted later and reads the rest": (
        [OTHER, P, P, THIRD, P],
        [call(0, out=1), call(0, out=3), DelegateCall(0, [2, 3, 4]), call(4, out=3)],
        {2: (0, 2), 4: (2, 3)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_value_lives_as_long_as_its_bytes_are_needed(name: str) -> None:
    values, steps, expected = CASES[name]
    found = spans(values, steps, inputs=(0,) if values[0] is OTHER else ())
    assert expected.items() <= found.items()


def test_inputs_and_outputs_live_to_the_ends() -> None:
    steps = [kernel(0, 1), kernel(1, 2), kernel(1, 3), kernel(3, 3)]
    assert spans([P] * 5, steps, inputs=(0,), outputs=(2,)) == {
        0: (0, 0),
        1: (0, 2),
        2: (1, 3),
        3: (2, 3),
    }
    (block,) = blocks([planned(2**33 + 16)], [], inputs=(0,))
    assert (block.offset, block.nbytes, block.memory_id) == (2**33 + 16, 16, 1)


def test_a_view_tells_what_wrote_its_bytes() -> None:
    values = [OTHER, P, SECOND, WIDE, THIRD]
    steps = [call(0, out=1), call(0, out=2), call(3, out=4)]
    found = {block.value: block.sources for block in blocks(values, steps, inputs=(0,))}
    assert found == {0: (), 1: (), 2: (), 3: (1, 2), 4: ()}


def test_indices_that_lead_nowhere_are_no_trouble() -> None:
    steps: list[Any] = [kernel(-1, 99, 0), DelegateCall(0, [77]), kernel()]
    assert spans([P], steps, inputs=(99,), outputs=(-7,)) == {0: (0, 0)}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=40))
def test_each_byte_tells_who_wrote_it_last(ranges: list[tuple[int, int]]) -> None:
    memory, naive = Memory(), dict[int, int]()
    for value, (start, length) in enumerate(ranges):
        inside = {write.value for write in memory.inside(start, start + length)}
        assert inside == {naive[byte] for byte in range(start, start + length) if byte in naive}
        memory.write(Write(start, start + length, value, value))
        naive |= dict.fromkeys(range(start, start + length), value)


def test_bytes_under_a_returned_view_live_to_the_end() -> None:
    # 1 is written at 0; 2, a result, has its bytes from then on, without an instruction.
    steps = [call(0, out=1), call(0, out=3), call(3, out=3)]
    lifetimes = spans([OTHER, P, P, THIRD], steps, inputs=(0,), outputs=(2,))
    assert (lifetimes[1], lifetimes[2]) == ((0, 0), (0, 2))
