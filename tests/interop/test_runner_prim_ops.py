"""Scalar operators: the runner computes what the official runtime computes."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from lowerdeck.runner import ExecutionError, load
from lowerdeck.serializer import Bool, Double, Int, ScalarType, serialize_pte
from lowerdeck_files import programs
from lowerdeck_zoo import official

TYPES: dict[torch.dtype, tuple[ScalarType, Callable[[], Any]]] = {
    torch.int64: (ScalarType.LONG, lambda: Int(0)),
    torch.float64: (ScalarType.DOUBLE, lambda: Double(0.0)),
}
COMPARISONS = ("eq", "lt", "le", "gt", "ge")
INTEGERS = [-7, -2, -1, 0, 1, 2, 3, 7]
REALS = [-2.5, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 3.0]


def program(operator: str, types: list[torch.dtype], result: Any) -> bytes:
    """Return a method that takes 0-dim tensors, and returns what one operator makes of them."""
    count = len(types)
    tensors = [programs.tensor((), TYPES[one][0], 16 * at) for at, one in enumerate(types)]
    values = [*tensors, *(TYPES[one][1]() for one in types), result]
    steps = [("aten::_local_scalar_dense.", [at, count + at]) for at in range(count)]
    steps.append((operator, range(count, len(values))))
    made = programs.program(values, *steps, inputs=range(count), outputs=[len(values) - 1])
    return bytes(serialize_pte(made))


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


I64, F64 = torch.int64, torch.float64
CASES: list[tuple[str, list[torch.dtype], Any]] = [
    *((f"{name}.Scalar", [I64] * 2, Int(0)) for name in ("add", "sub", "mul", "floordiv", "mod")),
    *((f"{name}.Scalar", [I64] * 2, Int(0)) for name in ("sym_max", "sym_min")),
    *((f"{name}.int", [I64] * 2, Int(0)) for name in ("floordiv", "mod")),
    ("truediv.Scalar", [I64] * 2, Double(0.0)),
    *((f"{name}.Scalar", [F64] * 2, Double(0.0)) for name in ("add", "sub", "mul", "truediv")),
    *((f"{name}.Scalar", [one] * 2, Bool(False)) for name in COMPARISONS for one in (I64, F64)),
    *((f"{name}.Scalar", [F64], Int(0)) for name in ("ceil", "round", "trunc")),
    ("neg.Scalar", [F64], Double(0.0)),
    ("neg.Scalar", [I64], Int(0)),
    ("sym_float.Scalar", [I64], Double(0.0)),
]


@pytest.mark.parametrize(("operator", "types", "result"), CASES, ids=str)
def test_scalar_operators(operator: str, types: list[torch.dtype], result: Any) -> None:
    name = operator.partition(".")[0]
    content = program(f"executorch_prim::{operator}", types, result)
    values = [torch.tensor(one, dtype=types[0]) for one in (INTEGERS, REALS)[types[0] is F64]]
    divides = name in ("floordiv", "truediv", "mod")
    calls = [call for call in product(values, repeat=len(types)) if call[-1].item() or not divides]
    assert differences(content, calls) == []
