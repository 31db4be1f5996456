"""From when to when a planned value is needed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowerdeck.serializer import (
    AllocationDetails,
    Bool,
    Chain,
    DelegateCall,
    EValue,
    ExecutionPlan,
    ExtraTensorInfo,
    Instruction,
    InstructionArguments,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    ScalarType,
    Tensor,
    TensorList,
)
from lowerdeck.serializer.report.aliases import Memory, Write
from lowerdeck.serializer.report.lifetimes import Block, planned_blocks


def planned(
    offset: int = 0, name: str | None = None, index: int = 0, *, floats: int = 4
) -> EValue:
    extra = ExtraTensorInfo(fully_qualified_name=name) if name else None
    return EValue(
        Tensor(
            ScalarType.FLOAT,
            sizes=[floats],
            dim_order=[0],
            data_buffer_idx=index,
            allocation_info=AllocationDetails.at(1, offset),
            extra_tensor_info=extra,
        )
    )


def blocks(
    values: list[EValue],
    steps: Sequence[InstructionArguments],
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> list[Block]:
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=list(inputs),
        outputs=list(outputs),
        chains=[Chain(instructions=[Instruction(step) for step in steps])],
    )
    return planned_blocks(plan)


def spans(
    values: list[EValue],
    steps: Sequence[InstructionArguments],
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> dict[int, tuple[int, int]]:
    found = blocks(values, steps, inputs, outputs)
    return {block.value: (block.born, block.dies) for block in found}


def test_a_value_lives_from_its_first_touch_to_its_last() -> None:
    steps = [KernelCall(0, [0, 1]), KernelCall(0, [1, 2]), KernelCall(0, [1, 3])]
    values = [planned() for _ in range(5)]
    assert spans(values, [*steps, KernelCall(0, [3, 3])], inputs=(0,), outputs=(2,)) == {
        0: (0, 0),
        1: (0, 2),
        2: (1, 3),
        3: (2, 3),
    }


@pytest.mark.parametrize("state", [planned(name="cache"), planned(index=1)])
def test_state_lives_all_the_time(state: EValue) -> None:
    steps = [KernelCall(0, [1, 1])] * 3
    assert spans([state, planned()], steps) == {0: (0, 2), 1: (0, 2)}


def test_members_of_a_list_live_as_long_as_the_list_is_used() -> None:
    values = [planned(), planned(), EValue(TensorList([0, 1])), planned()]
    steps = [KernelCall(0, [0, 0]), KernelCall(0, [1, 1]), KernelCall(0, [2, 3])]
    assert spans(values, steps) == {0: (0, 2), 1: (1, 2), 3: (2, 2)}


def test_bytes_under_a_moved_handle_live_as_long_as_its_new_owner() -> None:
    values = [planned(), EValue(Tensor(ScalarType.FLOAT, sizes=[4], dim_order=[0])), planned()]
    steps: list[InstructionArguments] = [
        KernelCall(0, [0, 0]),
        MoveCall(0, 1),
        KernelCall(0, [2, 2]),
        KernelCall(0, [1, 2]),
    ]
    assert spans(values, steps)[0] == (0, 3)


def test_a_loop_keeps_what_it_found_when_it_began() -> None:
    values = [planned(), planned(), EValue(Bool(True))]
    steps: list[InstructionArguments] = [
        KernelCall(0, [0, 0]),
        KernelCall(0, [0, 1]),
        KernelCall(0, [1, 1]),
        JumpFalseCall(2, 1),
        KernelCall(0, [1, 1]),
    ]
    assert spans(values, steps) == {0: (0, 3), 1: (1, 4)}


def test_offset_and_size_are_those_of_the_plan() -> None:
    plan = ExecutionPlan("f", values=[planned(2**33 + 16)], inputs=[0], chains=[Chain()])
    (block,) = planned_blocks(plan)
    assert (block.offset, block.nbytes, block.memory_id) == (2**33 + 16, 16, 1)


def call(*args: int, out: int) -> KernelCall:
    return KernelCall(0, [*args, out, out])


OTHER = 1024
"""An offset that nothing else in a test touches."""


def test_the_bytes_of_a_view_are_needed_since_its_source_was_written() -> None:
    # 1 is written at 0; 2 shares its bytes, without an instruction, and is read at 3.
    values = [planned(OTHER), planned(), planned(), planned(64), planned(128)]
    steps = [call(0, out=1), call(0, out=3), call(3, out=3), call(2, out=4)]
    assert spans(values, steps, inputs=(0,))[2] == (0, 3)


def test_a_view_of_a_part_keeps_the_part_alone() -> None:
    values = [planned(OTHER), planned(0, floats=8), planned(16), planned(64)]
    steps = [call(0, out=1), call(1, out=3), call(3, out=3), call(2, out=3)]
    found = spans(values, steps, inputs=(0,))
    assert found[1] == (0, 1)
    assert found[2] == (0, 3)


def test_parts_live_until_the_view_of_them_all_is_read() -> None:
    values = [planned(OTHER), planned(0), planned(16), planned(0, floats=8), planned(64)]
    steps = [call(0, out=1), call(0, out=2), call(0, out=4), call(3, out=4)]
    found = spans(values, steps, inputs=(0,))
    assert (found[1], found[2], found[3]) == ((0, 3), (1, 3), (3, 3))


def test_a_view_tells_what_wrote_its_bytes() -> None:
    values = [planned(OTHER), planned(0), planned(16), planned(0, floats=8), planned(64)]
    steps = [call(0, out=1), call(0, out=2), call(3, out=4)]
    found = {block.value: block.sources for block in blocks(values, steps, inputs=(0,))}
    assert found == {0: (), 1: (), 2: (), 3: (1, 2), 4: ()}


def test_memory_that_is_used_again_is_no_view() -> None:
    values = [planned(OTHER), planned(), planned(), planned(64)]
    steps = [call(0, out=1), call(1, out=3), call(3, out=2), call(2, out=3)]
    found = spans(values, steps, inputs=(0,))
    assert (found[1], found[2]) == ((0, 1), (2, 3))


def test_a_delegate_makes_what_is_wanted_later_and_reads_the_rest() -> None:
    values = [planned(OTHER), planned(), planned(), planned(64), planned(0)]
    steps: list[InstructionArguments] = [
        call(0, out=1),
        call(0, out=3),
        DelegateCall(0, [2, 3, 4]),
        call(4, out=3),
    ]
    found = spans(values, steps, inputs=(0,))
    assert found[2] == (0, 2), "a view, read by the delegate alone"
    assert found[4] == (2, 3), "a result, in memory that is free again"


def test_indices_that_lead_nowhere_are_no_trouble() -> None:
    steps: list[InstructionArguments] = [
        KernelCall(0, [-1, 99, 0]),
        DelegateCall(0, [77]),
        KernelCall(0, []),
    ]
    assert spans([planned()], steps, inputs=(99,), outputs=(-7,)) == {0: (0, 0)}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=40))
def test_each_byte_tells_who_wrote_it_last(ranges: list[tuple[int, int]]) -> None:
    memory, naive = Memory(), dict[int, int]()
    for value, (start, length) in enumerate(ranges):
        inside = {write.value for write in memory.inside(start, start + length)}
        assert inside == {naive[byte] for byte in range(start, start + length) if byte in naive}
        memory.write(Write(start, start + length, value, value))
        naive |= dict.fromkeys(range(start, start + length), value)
