"""The numbers of which verify warns do end the official runtime, and its neighbours do not."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.serializer import (
    AllocationDetails,
    Chain,
    EValue,
    ExecutionPlan,
    Hazard,
    Instruction,
    Int,
    KernelCall,
    Operator,
    Program,
    ScalarType,
    String,
    Tensor,
    runtime_kernels,
    serialize_pte,
    verify_pte,
)
from lowerdeck_zoo import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)
DIVIDING = sorted(name for name, row in runtime_kernels().items() if "divides" in row.words)
LEAST = -(1 << 63)


def tensor(slot: int) -> EValue:
    memory = AllocationDetails(1, 64 * slot)
    return EValue(Tensor(ScalarType.LONG, sizes=[2], dim_order=[0], allocation_info=memory))


def division(name: str, dividend: int, divisor: int) -> tuple[bytes, bool, bool]:
    """Return a file that divides its inputs, and whether these are tensors."""
    letters = runtime_kernels()[name].arguments
    left, right = (letter == "T" for letter in letters[:2])
    values = [
        tensor(0) if left else EValue(Int(dividend)),
        tensor(1) if right else EValue(Int(divisor)),
    ]
    if "r" in letters:
        values.append(EValue(String("trunc")))
    values.append(tensor(2) if left else EValue(Int(0)))
    last = len(values) - 1
    operator, _, overload = name.partition(".")
    args = [*range(last), *[last] * (1 + left)]
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=[0, 1] if right or not left else [0],
        outputs=[last],
        chains=[Chain(instructions=[Instruction(KernelCall(0, args))])],
        operators=[Operator(operator, overload)],
        non_const_buffer_sizes=[0, 1024],
    )
    return bytes(serialize_pte(Program(execution_plan=[plan]))), left, right


def run(name: str, dividend: int, divisor: int) -> object:
    file, left, right = division(name, dividend, divisor)
    inputs = [torch.full((2,), dividend) if left else dividend]
    if right or not left:
        inputs.append(torch.full((2,), divisor) if right else divisor)
    return official.run(file, [official.Call(tuple(inputs))])


@pytest.mark.parametrize("name", DIVIDING)
def test_the_smallest_integer_by_minus_one_ends_the_process_and_is_warned_of(name: str) -> None:
    hazards: list[Hazard] = []
    verify_pte(division(name, LEAST, -1)[0], on_hazard=hazards.append)
    assert len(hazards) == 1
    assert isinstance(run(name, LEAST, -1), official.Crash)
    assert isinstance(run(name, LEAST + 1, -1), official.Ran)


@pytest.mark.parametrize("name", [one for one in DIVIDING if one.startswith("executorch_prim")])
def test_a_number_by_zero_ends_the_process(name: str) -> None:
    assert isinstance(run(name, 5, 0), official.Crash)


@pytest.mark.parametrize("name", [one for one in DIVIDING if one.endswith("Tensor_out")])
def test_a_tensor_by_zero_is_an_error(name: str) -> None:
    assert isinstance(run(name, 5, 0), official.MethodError)


@pytest.mark.parametrize("name", ["aten::fmod.Tensor_out", "aten::fmod.Scalar_out"])
def test_the_remainder_of_c_survives(name: str) -> None:
    assert isinstance(run(name, LEAST, -1), official.Ran)
    hazards: list[Hazard] = []
    verify_pte(division(name, LEAST, -1)[0], on_hazard=hazards.append)
    assert not hazards
