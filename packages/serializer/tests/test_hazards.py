"""Verify warns where the numbers of a run may end the runtime, and nowhere else."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from lowerdeck.serializer import (
    Bool,
    ContentError,
    Double,
    EValue,
    Hazard,
    Int,
    IntList,
    JumpFalseCall,
    MoveCall,
    Null,
    Program,
    ScalarType,
    String,
    serialize_pte,
    verify_pte,
)
from lowerdeck_files.programs import program as _program
from lowerdeck_files.programs import tensor

LEAST = -(1 << 63)
CONSTANTS = [struct.pack("<2q", *pair) for pair in ((2, 3), (2, -1), (LEAST, 1))]


def planned(kind: ScalarType, slot: int) -> Any:
    return tensor((2,), kind, 64 * slot)


def constant(number: int) -> Any:
    return tensor((2,), ScalarType.LONG, index=number)


def program(
    name: str,
    args: Sequence[object],
    inputs: Sequence[int] = (),
    before: Sequence[object] = (),
    after: Sequence[object] = (),
) -> Any:
    """Return a program of one call; with other steps, its last value is theirs alone."""
    call = (name, range(len(args) - bool(before or after)))
    return _program(args, *before, call, *after, constants=CONSTANTS, inputs=inputs)


def found(made: Program) -> list[Hazard]:
    hazards: list[Hazard] = []
    verify_pte(serialize_pte(made), on_hazard=hazards.append)
    return hazards


def tensors(
    name: str, divisor: EValue | Int, mode: str | None = None, kind: ScalarType = ScalarType.LONG
) -> Any:
    """Return a program that divides tensor 0 by something."""
    modes = [String(mode)] if mode else [Null()] if "mode" in name else []
    out = planned(kind, 2)
    return program(name, [planned(kind, 0), divisor, *modes, out, out], [0])


def numbers(
    name: str, left: object, right: object, inputs: Sequence[int] = (), result: object = Int(0)
) -> Any:
    return program(f"executorch_prim::{name}", [left, right, result], inputs)


L, N, S, F = ScalarType.LONG, ScalarType.INT, ScalarType.SHORT, ScalarType.FLOAT
MOVED = [MoveCall(3, 1)]
TO_0 = [MoveCall(3, 0)]
JUMP_BACK = [JumpFalseCall(3, 0)]


def prim(name: str, *left_and_right: int, before: Sequence[object] = ()) -> Any:
    """Return a call of an operator of numbers, value 3 being another number."""
    values = [*map(Int, left_and_right), Int(0), Int(7)]
    return program(f"executorch_prim::{name}", values, before=before)


def looped(condition: object, inputs: Sequence[int] = (), **where: Sequence[object]) -> Any:
    """Return a call and a jump by value 3."""
    return program("aten::neg.out", [planned(F, 0)] * 3 + [condition], inputs, **where)


FLOOR, REMAINDER = "aten::floor_divide.out", "aten::remainder.Tensor_out"
OUT = [planned(L, 2), planned(L, 2)]
SHUFFLED = [planned(F, 0), Int(2), planned(F, 1), planned(F, 1), Int(3)]
HAZARDS = {
    "floordiv by what is computed": (prim("floordiv.Scalar", 4, 2, before=MOVED), "a 0 there"),
    "floordiv by 0": (numbers("floordiv.int", Int(4), Int(0)), "by 0, which ends"),
    "floordiv by -1": (prim("floordiv.int", 4, -1, before=TO_0), "by -1"),
    "the least by -1": (numbers("mod.Scalar", Int(LEAST), Int(-1)), "by -1"),
    "floor_divide": (tensors(FLOOR, planned(L, 1)), "smallest integer by -1"),
    "floor_divide of int": (tensors(FLOOR, planned(N, 1), kind=N), "by -1"),
    "floor_divide by a constant -1": (tensors(FLOOR, constant(2)), "by -1"),
    "floor": (tensors("aten::div.out_mode", planned(L, 1), "floor"), "by value 1"),
    "remainder": (tensors(REMAINDER, planned(L, 1)), "by value 1"),
    "the least in a constant": (
        program(FLOOR, [constant(3), planned(L, 1), *OUT], [1]),
        "smallest integer by -1",
    ),
    "a scalar -1": (tensors("aten::remainder.Scalar_out", Int(-1)), "by value 1"),
    "div by a scalar -1": (tensors("aten::div.Scalar_mode_out", Int(-1), "trunc"), "by value 1"),
    "a loop that an input ends": (
        looped(planned(ScalarType.BOOL, 1), [3], after=JUMP_BACK),
        "which nothing writes",
    ),
    "a group that is computed": (
        program("aten::pixel_shuffle.out", SHUFFLED, before=[MoveCall(4, 1)]),
        "a 0 there ends",
    ),
}
SAFE = {
    # The runtime compares inputs with the file's.
    "floordiv by an input": numbers("floordiv.Scalar", Int(4), Int(2), [0, 1]),
    "a computed number by -2": prim("mod.Scalar", 4, -2, before=TO_0),
    "a number by -1": numbers("mod.Scalar", Int(7), Int(-1)),
    "by a float": numbers("floordiv.Scalar", Int(4), Double(0.0), [0, 1]),
    "a true division": numbers("truediv.Scalar", Int(4), Int(0), [0, 1], Double(0.0)),
    "by constants": tensors(FLOOR, constant(1)),
    "a constant by a tensor": program(FLOOR, [constant(1), planned(L, 1), *OUT], [1]),
    "a division without rounding": tensors("aten::div.out_mode", planned(F, 1), kind=F),
    "floats": tensors(FLOOR, planned(F, 1), kind=F),
    "short integers": tensors(REMAINDER, planned(S, 1), kind=S),
    "a scalar 3": tensors("aten::remainder.Scalar_out", Int(3)),
    "a jump forward": looped(Bool(bool_val=False), [3], before=[JumpFalseCall(3, 2)]),
    "a loop that is none": looped(Bool(bool_val=True), after=JUMP_BACK),
}


@pytest.mark.parametrize("name", [*HAZARDS, *SAFE])
def test_a_hazard_is_reported_where_numbers_decide_and_nowhere_else(name: str) -> None:
    if name in SAFE:
        assert found(SAFE[name]) == []
        return
    made, reason = HAZARDS[name]
    (hazard,) = found(made)
    assert reason in str(hazard)
    assert hazard.field.startswith("method 'forward'.chains[0].instructions[")
    assert hazard.offset > 0


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
    values = [tensor((2, 3), at=0), *map(Int, (0, 1, 1 << 40, 0)), planned(L, 2)]
    steps = (first, [*args, 4]), ("aten::arange.start_out", [1, 4, 2, 5, 5])
    hazards = found(_program(values, *steps, inputs=[0]))
    assert ["makes as many numbers" in one.reason for one in hazards] == [True] * warned
