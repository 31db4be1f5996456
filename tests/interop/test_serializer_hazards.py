"""The numbers of which verify warns do end the official runtime, and its neighbours do not."""

from __future__ import annotations

import pytest
import torch

from lowerdeck.serializer import (
    Hazard,
    Int,
    ScalarType,
    String,
    runtime_kernels,
    serialize_pte,
    verify_pte,
)
from lowerdeck_files.programs import program, tensor
from lowerdeck_zoo import official

DIVIDING = sorted(name for name, row in runtime_kernels().items() if "divides" in row.words)
LEAST = -(1 << 63)


def division(name: str, dividend: int, divisor: int) -> tuple[bytes, bool, bool]:
    """Return a file that divides its inputs, and whether these are tensors."""
    letters = runtime_kernels()[name].arguments
    left, right = (letter == "T" for letter in letters[:2])
    values = [
        tensor((2,), ScalarType.LONG, 0) if left else Int(dividend),
        tensor((2,), ScalarType.LONG, 64) if right else Int(divisor),
    ]
    if "r" in letters:
        values.append(String("trunc"))
    values.append(tensor((2,), ScalarType.LONG, 128) if left else Int(0))
    last = len(values) - 1
    step = (name, [*range(last), *[last] * (1 + left)])
    inputs = [0, 1] if right or not left else [0]
    return serialize_pte(program(values, step, inputs=inputs, outputs=[last])), left, right


def run(name: str, dividend: int, divisor: int) -> object:
    file, left, right = division(name, dividend, divisor)
    inputs = [torch.full((2,), dividend) if left else dividend]
    if right or not left:
        inputs.append(torch.full((2,), divisor) if right else divisor)
    return official.run(file, [official.Call(tuple(inputs))])


def hazards_of(name: str) -> list[Hazard]:
    hazards: list[Hazard] = []
    verify_pte(division(name, LEAST, -1)[0], on_hazard=hazards.append)
    return hazards


@pytest.mark.parametrize("name", DIVIDING)
def test_a_division_that_ends_the_process_is_warned_of(name: str) -> None:
    assert len(hazards_of(name)) == 1
    assert isinstance(run(name, LEAST, -1), official.Crash)
    assert isinstance(run(name, LEAST + 1, -1), official.Ran)
    if name.startswith("executorch_prim"):
        assert isinstance(run(name, 5, 0), official.Crash)
    elif name.endswith("Tensor_out"):
        assert isinstance(run(name, 5, 0), official.MethodError)


@pytest.mark.parametrize("name", ["aten::fmod.Tensor_out", "aten::fmod.Scalar_out"])
def test_the_remainder_of_c_survives(name: str) -> None:
    assert isinstance(run(name, LEAST, -1), official.Ran)
    assert not hazards_of(name)
