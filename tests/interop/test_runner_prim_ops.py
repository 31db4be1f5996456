"""Scalar operators: the runner computes what the official runtime computes."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from lowerdeck.runner import ExecutionError, load
from lowerdeck.serializer import (
    AllocationDetails,
    Bool,
    Chain,
    Double,
    EValue,
    ExecutionPlan,
    Instruction,
    Int,
    KernelCall,
    Operator,
    Program,
    ScalarType,
    Tensor,
    serialize_pte,
)
from lowerdeck_zoo import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)

TYPES: dict[torch.dtype, tuple[ScalarType, Callable[[], Any]]] = {
    torch.int64: (ScalarType.LONG, lambda: Int(0)),
    torch.float64: (ScalarType.DOUBLE, lambda: Double(0.0)),
}
COMPARISONS = ("eq", "lt", "le", "gt", "ge")
BINARY = ["add", "sub", "mul", "floordiv", "truediv", "eq", "lt", "le", "gt", "ge"]
INTEGERS = [-7, -2, -1, 0, 1, 2, 3, 7]
REALS = [-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 3.0]


def program(name: str, overload: str, types: list[torch.dtype], result: Any) -> bytes:
    """Return a method that takes 0-dim tensors, and returns what one operator makes of them."""
    values: list[EValue] = []
    code = []
    scalars = []
    for number, dtype in enumerate(types):
        scalar_type, scalar = TYPES[dtype]
        allocation = AllocationDetails.at(1, 16 * number)
        values.append(EValue(Tensor(scalar_type, allocation_info=allocation)))
        values.append(EValue(scalar()))
        scalars.append(len(values) - 1)
        code.append(Instruction(KernelCall(0, [len(values) - 2, len(values) - 1])))
    values.append(EValue(result))
    code.append(Instruction(KernelCall(1, [*scalars, len(values) - 1])))
    plan = ExecutionPlan(
        "forward",
        values=values,
        inputs=[2 * number for number in range(len(types))],
        outputs=[len(values) - 1],
        chains=[Chain(instructions=code)],
        operators=[Operator("aten::_local_scalar_dense"), Operator(name, overload)],
        non_const_buffer_sizes=[0, 16 * len(types)],
    )
    return serialize_pte(Program(execution_plan=[plan]))


def differences(content: bytes, inputs: Sequence[tuple[torch.Tensor, ...]]) -> list[str]:
    found = []
    forward = load(content).method()
    outcomes = official.run_many(official.Case(content, [official.Call(each)]) for each in inputs)
    for each, outcome in zip(inputs, outcomes, strict=True):
        try:
            ours: Any = forward.run_flat(each)
        except ExecutionError as error:
            ours = error
        theirs: Any = outcome.outputs[0] if isinstance(outcome, official.Ran) else outcome
        failed = isinstance(ours, ExecutionError)
        if failed != (not isinstance(outcome, official.Ran)) or (
            not failed and (ours != theirs or type(ours[0]) is not type(theirs[0]))
        ):
            found.append(f"{[value.item() for value in each]}: {ours}, officially {theirs}")
    return found


def tensors(values: list[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=dtype) for value in values]


@pytest.mark.parametrize(
    "operator",
    [f"{name}.Scalar" for name in (*BINARY, "mod", "sym_max", "sym_min")]
    + ["floordiv.int", "mod.int"],
)
def test_integer_operators(operator: str) -> None:
    name, _, overload = operator.partition(".")
    result: Any = Bool(False) if name in COMPARISONS else Int(0)
    if name == "truediv":
        result = Double(0.0)
    content = program(f"executorch_prim::{name}", overload, [torch.int64] * 2, result)
    pairs = list(product(tensors(INTEGERS, torch.int64), tensors(INTEGERS, torch.int64)))
    if name in ("floordiv", "truediv", "mod"):
        pairs = [pair for pair in pairs if pair[1].item()]
    assert differences(content, pairs) == []


@pytest.mark.parametrize("name", [n for n in BINARY if n != "floordiv"])
def test_real_operators(name: str) -> None:
    result: Any = Bool(False) if name in COMPARISONS else Double(0.0)
    content = program(f"executorch_prim::{name}", "Scalar", [torch.float64] * 2, result)
    pairs = list(product(tensors(REALS, torch.float64), tensors(REALS, torch.float64)))
    if name == "truediv":
        pairs = [pair for pair in pairs if pair[1].item()]
    assert differences(content, pairs) == []


@pytest.mark.parametrize("name", ["ceil", "round", "trunc", "neg"])
def test_rounding(name: str) -> None:
    result: Any = Double(0.0) if name == "neg" else Int(0)
    content = program(f"executorch_prim::{name}", "Scalar", [torch.float64], result)
    assert differences(content, [(value,) for value in tensors(REALS, torch.float64)]) == []


@pytest.mark.parametrize("name", ["neg", "sym_float"])
def test_one_integer(name: str) -> None:
    result: Any = Double(0.0) if name == "sym_float" else Int(0)
    content = program(f"executorch_prim::{name}", "Scalar", [torch.int64], result)
    assert differences(content, [(value,) for value in tensors(INTEGERS, torch.int64)]) == []
