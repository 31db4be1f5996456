"""Memory that a view gives: only where no way leads past the view, and never a constant's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lowerdeck.serializer import (
    Bool,
    Buffer,
    Chain,
    ContentError,
    EValue,
    ExecutionPlan,
    Instruction,
    InstructionArguments,
    IntList,
    JumpFalseCall,
    KernelCall,
    Operator,
    Program,
    ScalarType,
    Tensor,
    TensorList,
    serialize_pte,
    verify_pte,
)

_INPUT, _VIEW, _OTHER, _SIZES, _FLAG, _OUT, _LIST, _CONSTANT, _WIDE = range(9)


def _tensor(size: int = 4, index: int = 0) -> EValue:
    return EValue(Tensor(ScalarType.FLOAT, sizes=[size], dim_order=[0], data_buffer_idx=index))


def _file(*steps: InstructionArguments) -> bytes:
    return _chains(steps)


def _chains(*chains: Sequence[InstructionArguments]) -> bytes:
    values = [_tensor(), _tensor(), _tensor(), EValue(IntList([])), EValue(Bool(True)), _tensor()]
    values += [EValue(TensorList([_INPUT, _VIEW])), _tensor(index=1), _tensor(8)]
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=[_INPUT],
        outputs=[_OUT],
        chains=[Chain(instructions=[Instruction(step) for step in steps]) for steps in chains],
        operators=[
            Operator("executorch_prim::et_view", "default"),
            Operator("mine::use", "out"),
            Operator("aten::relu", "out"),
        ],
    )
    return serialize_pte(
        Program(execution_plan=[plan], constant_buffer=[Buffer(b""), Buffer(bytes(16))])
    )


def _view(source: int, out: int) -> KernelCall:
    return KernelCall(0, [source, _SIZES, out, out])


def _use(value: int) -> KernelCall:
    return KernelCall(1, [value, _OUT, _OUT])


_AWAY = JumpFalseCall


@pytest.mark.parametrize(
    "steps",
    [
        (_view(_INPUT, _VIEW), _use(_VIEW)),
        (_view(_INPUT, _VIEW), _view(_VIEW, _OTHER), _use(_OTHER), _use(_LIST), _use(_LIST)),
        # A branch that takes the view and uses it.
        (_AWAY(_FLAG, 3), _view(_INPUT, _VIEW), _use(_VIEW), _use(_INPUT)),
        # A loop around both.
        (_view(_INPUT, _VIEW), _use(_VIEW), _AWAY(_FLAG, 0)),
        # Jumps after the view, and before it.
        (_AWAY(_FLAG, 1), _view(_INPUT, _VIEW), _AWAY(_FLAG, 4), _use(_VIEW), _use(_VIEW)),
        # Taken on both ways.
        (
            *(_AWAY(_FLAG, 3), _view(_INPUT, _VIEW), _use(_VIEW)),
            *(_view(_INPUT, _VIEW), _use(_VIEW)),
        ),
    ],
)
def test_a_view_gives_memory(steps: tuple[InstructionArguments, ...]) -> None:
    verify_pte(_file(*steps))


@pytest.mark.parametrize(
    "steps",
    [
        (_use(_VIEW), _view(_INPUT, _VIEW)),
        (_use(_LIST), _view(_INPUT, _VIEW)),
        (_view(_OTHER, _VIEW), _use(_VIEW)),
        # A jump past the view.
        (_AWAY(_FLAG, 2), _view(_INPUT, _VIEW), _use(_VIEW)),
        (_AWAY(_FLAG, 3), _view(_INPUT, _VIEW), _use(_LIST), _use(_LIST)),
        # Past it, and back after it.
        (_AWAY(_FLAG, 4), _view(_INPUT, _VIEW), _use(_VIEW), _use(_VIEW), _AWAY(_FLAG, 2)),
        # Of other bytes than its source has.
        (_view(_INPUT, _WIDE), _use(_WIDE)),
    ],
)
def test_a_tensor_without_memory_is_refused(steps: tuple[InstructionArguments, ...]) -> None:
    with pytest.raises(ContentError, match=r"without memory|found a view of"):
        verify_pte(_file(*steps))


def test_what_a_view_gave_memory_has_none_in_the_next_chain() -> None:
    steps = _view(_INPUT, _VIEW), _use(_VIEW)
    verify_pte(_chains(steps, steps))
    with pytest.raises(ContentError, match="without memory"):
        verify_pte(_chains(steps, steps[1:]))
    with pytest.raises(ContentError, match="without memory"):
        verify_pte(_chains(steps, steps[::-1]))


def test_a_constant_can_be_viewed_and_not_written_through_a_view() -> None:
    views = _view(_CONSTANT, _VIEW), _view(_VIEW, _OTHER)
    verify_pte(_file(*views, _use(_OTHER)))
    with pytest.raises(ContentError, match=f"found the constant {_OTHER} where aten::relu"):
        verify_pte(_file(*views, KernelCall(2, [_INPUT, _OTHER, _OTHER])))


def test_a_constant_cannot_become_a_view() -> None:
    with pytest.raises(ContentError, match=f"found the constant {_CONSTANT} as a view"):
        verify_pte(_file(_view(_INPUT, _CONSTANT)))
