"""Verify warns where the numbers of a run may end the runtime, and nowhere else."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lowerdeck.script import main
from lowerdeck.serializer import (
    AllocationDetails,
    Bool,
    Buffer,
    Chain,
    ContentError,
    Double,
    EValue,
    ExecutionPlan,
    Hazard,
    Instruction,
    Int,
    IntList,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    Null,
    Operator,
    Program,
    ScalarType,
    String,
    Tensor,
    serialize_pte,
    verify_pte,
)

LEAST = -(1 << 63)


def planned(kind: ScalarType, slot: int) -> EValue:
    return EValue(
        Tensor(kind, sizes=[2], dim_order=[0], allocation_info=AllocationDetails(1, 64 * slot))
    )


def constant(number: int) -> EValue:
    """Return a tensor of int64 whose bytes are a buffer of the program."""
    return EValue(Tensor(ScalarType.LONG, sizes=[2], dim_order=[0], data_buffer_idx=number))


BUFFERS = [
    Buffer(b""),
    *(Buffer(struct.pack("<2q", *pair)) for pair in ((2, 3), (2, -1), (LEAST, 1))),
]


def program(
    name: str,
    args: Sequence[object],
    inputs: Sequence[int] = (),
    before: Sequence[Instruction] = (),
    after: Sequence[Instruction] = (),
) -> Program:
    """Return a program of one call, whose arguments are values in their order."""
    values = [one if isinstance(one, EValue) else EValue(one) for one in args]  # type: ignore[arg-type]
    operator, _, overload = name.partition(".")
    # Values beyond those of the kernel are for moves and jumps.
    taken = len(values) - bool(before or after)
    call = Instruction(KernelCall(0, list(range(taken))))
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=list(inputs),
        outputs=[],
        chains=[Chain(instructions=[*before, call, *after])],
        operators=[Operator(operator, overload)],
        non_const_buffer_sizes=[0, 1024],
    )
    return Program(execution_plan=[plan], constant_buffer=BUFFERS)


def found(made: Program) -> list[Hazard]:
    hazards: list[Hazard] = []
    verify_pte(serialize_pte(made), on_hazard=hazards.append)
    return hazards


def tensors(
    name: str, divisor: EValue | Int, mode: str | None = None, kind: ScalarType = ScalarType.LONG
) -> Program:
    """Return a program that divides tensor 0 by something."""
    modes = [String(mode)] if mode else [Null()] if "mode" in name else []
    out = planned(kind, 2)
    return program(name, [planned(kind, 0), divisor, *modes, out, out], [0])


def numbers(
    name: str,
    left: object,
    right: object,
    inputs: Sequence[int] = (),
    result: object = Int(0),
) -> Program:
    return program(f"executorch_prim::{name}", [left, right, result], inputs)


L, N, S, F = ScalarType.LONG, ScalarType.INT, ScalarType.SHORT, ScalarType.FLOAT
MOVED = [Instruction(MoveCall(3, 1))]
TO_0 = [Instruction(MoveCall(3, 0))]
JUMP_BACK = [Instruction(JumpFalseCall(3, 0))]

HAZARDS = {
    "floordiv by what is computed": (
        program(
            "executorch_prim::floordiv.Scalar", [Int(4), Int(2), Int(0), Int(7)], before=MOVED
        ),
        "a 0 there",
    ),
    "mod by what is moved there": (
        program(
            "executorch_prim::mod.Scalar",
            [Int(4), Int(2), Int(0), Int(7)],
            before=MOVED,
        ),
        "a 0 there",
    ),
    "floordiv by 0": (numbers("floordiv.int", Int(4), Int(0)), "by 0, which ends"),
    "floordiv by -1": (
        program("executorch_prim::floordiv.int", [Int(4), Int(-1), Int(0), Int(7)], before=TO_0),
        "by -1",
    ),
    "the least by -1": (numbers("mod.Scalar", Int(LEAST), Int(-1)), "by -1"),
    "floor_divide": (tensors("aten::floor_divide.out", planned(L, 1)), "smallest integer by -1"),
    "floor_divide of int": (tensors("aten::floor_divide.out", planned(N, 1), kind=N), "by -1"),
    "floor_divide by a constant -1": (tensors("aten::floor_divide.out", constant(2)), "by -1"),
    "floor": (tensors("aten::div.out_mode", planned(L, 1), "floor"), "by value 1"),
    "remainder": (tensors("aten::remainder.Tensor_out", planned(L, 1)), "by value 1"),
    "the least in a constant": (
        program(
            "aten::floor_divide.out",
            [constant(3), planned(L, 1), planned(L, 2), planned(L, 2)],
            [1],
        ),
        "smallest integer by -1",
    ),
    "a scalar -1": (tensors("aten::remainder.Scalar_out", Int(-1)), "by value 1"),
    "div by a scalar -1": (tensors("aten::div.Scalar_mode_out", Int(-1), "trunc"), "by value 1"),
    "a loop that an input ends": (
        program(
            "aten::neg.out",
            [planned(F, 0)] * 3 + [planned(ScalarType.BOOL, 1)],
            [3],
            after=JUMP_BACK,
        ),
        "which nothing writes",
    ),
    "a loop that nothing ends": (
        program("aten::neg.out", [planned(F, 0)] * 3 + [Bool(bool_val=False)], after=JUMP_BACK),
        "which nothing writes",
    ),
    "a group that is computed": (
        program(
            "aten::pixel_shuffle.out",
            [planned(F, 0), Int(2), planned(F, 1), planned(F, 1), Int(3)],
            before=[Instruction(MoveCall(4, 1))],
        ),
        "a 0 there ends",
    ),
}
SAFE = {
    "floordiv by an input, which the runtime compares with the file's": program(
        "executorch_prim::floordiv.Scalar", [Int(4), Int(2), Int(0)], [0, 1]
    ),
    "a computed number by -2": program(
        "executorch_prim::mod.Scalar", [Int(4), Int(-2), Int(0), Int(7)], before=TO_0
    ),
    "a number by -1": numbers("mod.Scalar", Int(7), Int(-1)),
    "by a float": numbers("floordiv.Scalar", Int(4), Double(0.0), [0, 1]),
    "a true division": numbers("truediv.Scalar", Int(4), Int(0), [0, 1], Double(0.0)),
    "by constants": tensors("aten::floor_divide.out", constant(1)),
    "a constant by a tensor": program(
        "aten::floor_divide.out", [constant(1), planned(L, 1), planned(L, 2), planned(L, 2)], [1]
    ),
    "a division without rounding": tensors("aten::div.out_mode", planned(F, 1), kind=F),
    "floats": tensors("aten::floor_divide.out", planned(F, 1), kind=F),
    "short integers": tensors("aten::remainder.Tensor_out", planned(S, 1), kind=S),
    "a scalar 3": tensors("aten::remainder.Scalar_out", Int(3)),
    "a jump forward": program(
        "aten::neg.out",
        [planned(F, 0)] * 3 + [Bool(bool_val=False)],
        [3],
        before=[Instruction(JumpFalseCall(3, 2))],
    ),
    "a loop that is none": program(
        "aten::neg.out", [planned(F, 0)] * 3 + [Bool(bool_val=True)], after=JUMP_BACK
    ),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_what_numbers_decide_is_told(name: str) -> None:
    made, reason = HAZARDS[name]
    (hazard,) = found(made)
    assert reason in str(hazard)
    assert hazard.field.startswith("method 'forward'.chains[0].instructions[")
    assert hazard.offset > 0


@pytest.mark.parametrize("name", SAFE)
def test_what_cannot_happen_is_not_told(name: str) -> None:
    assert found(SAFE[name]) == []


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("gt.Scalar", Bool(False), Int(0)),
        ("eq.Scalar", Bool(False), IntList([])),
        ("lt.Scalar", Bool(False), planned(ScalarType.FLOAT, 1).val),
        ("truediv.Scalar", Double(0.0), Bool(False)),
        ("mod.int", Int(0), Double(0.0)),
        ("add.Scalar", Int(0), Null()),
        ("mul.Scalar", Double(0.0), String("a")),
    ],
)
def test_a_number_is_not_written_over_another_kind(name: str, right: Any, wrong: Any) -> None:
    """The next call would find it there: kernels end the process on a value of another kind."""
    verify_pte(serialize_pte(numbers(name, Int(4), Int(3), result=right)))
    with pytest.raises(ContentError, match="writes its result, expected"):
        verify_pte(serialize_pte(numbers(name, Int(4), Int(3), result=wrong)))


def test_the_command_prints_warnings_and_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "divides.pte"
    path.write_bytes(serialize_pte(HAZARDS["floordiv by what is computed"][0]))
    assert main(["verify", str(path)]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: warning: method 'forward'.chains[0].instructions[1] at byte")
    assert last == f"{path}: ok"
    assert main(["verify", "-q", str(path)]) == 0
    assert capsys.readouterr().out == ""


def _range(first: str, first_args: Sequence[int]) -> Program:
    """Return a program that makes as many numbers as a call before it computes."""
    values = [
        EValue(
            Tensor(
                ScalarType.FLOAT,
                sizes=[2, 3],
                dim_order=[0, 1],
                allocation_info=AllocationDetails(1, 0),
            )
        ),
        *(EValue(Int(number)) for number in (0, 1, 1 << 40, 0)),
        planned(ScalarType.LONG, 2),
    ]
    names = [first, "aten::arange.start_out"]
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=[0],
        outputs=[],
        chains=[
            Chain(
                instructions=[
                    Instruction(KernelCall(0, [*first_args, 4])),
                    Instruction(KernelCall(1, [1, 4, 2, 5, 5])),
                ]
            )
        ],
        operators=[Operator(*name.split(".")) for name in names],
        non_const_buffer_sizes=[0, 1024],
    )
    return Program(execution_plan=[plan], constant_buffer=BUFFERS)


@pytest.mark.parametrize(
    ("first", "args", "warned"),
    [
        ("aten::sym_size.int", [0, 2], False),
        ("executorch_prim::add.Scalar", [1, 2], False),
        ("executorch_prim::add.Scalar", [3, 2], True),
        ("executorch_prim::mul.Scalar", [3, 1], False),
        ("executorch_prim::sub.Scalar", [1, 3], True),
        # What it computes is not followed.
        ("executorch_prim::trunc.Scalar", [2], True),
    ],
)
def test_a_range_to_a_computed_end_is_warned_of_unless_sizes_bound_it(
    first: str, args: Sequence[int], warned: bool
) -> None:
    hazards = found(_range(first, args))
    assert ["makes as many numbers" in one.reason for one in hazards] == [True] * warned
