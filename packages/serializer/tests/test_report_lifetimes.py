"""From when to when a planned value is needed."""

from collections.abc import Sequence

import pytest

from lowerdeck.serializer import (
    AllocationDetails,
    Bool,
    Chain,
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
from lowerdeck.serializer.report.lifetimes import planned_blocks


def planned(offset: int = 0, name: str | None = None, index: int = 0) -> EValue:
    extra = ExtraTensorInfo(fully_qualified_name=name) if name else None
    return EValue(
        Tensor(
            ScalarType.FLOAT,
            sizes=[4],
            dim_order=[0],
            data_buffer_idx=index,
            allocation_info=AllocationDetails.at(1, offset),
            extra_tensor_info=extra,
        )
    )


def spans(
    values: list[EValue],
    steps: Sequence[InstructionArguments],
    inputs: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
) -> dict[int, tuple[int, int]]:
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=list(inputs),
        outputs=list(outputs),
        chains=[Chain(instructions=[Instruction(step) for step in steps])],
    )
    return {block.value: (block.born, block.dies) for block in planned_blocks(plan)}


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
