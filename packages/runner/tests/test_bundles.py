"""Programs with test cases."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import InputError, ProgramError, make_bundle
from lowerdeck.serializer import BundledProgram, Program, write_pte

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])


@pytest.fixture
def program(method: Any) -> Program:
    """x + y, and a number that no instruction reads."""
    x, y, out = method.tensor([2, 2]), method.tensor([2, 2]), method.tensor([2, 2])
    method.call("aten::add.out", x, y, method.integer(1), out, out)
    made: Program = method.ends([x, y], [out])
    return made


def test_cases_are_those_of_the_program_itself(program: Program, tmp_path: Path) -> None:
    write_pte(program, tmp_path / "model.pte")
    for source in (program, tmp_path / "model.pte", (tmp_path / "model.pte").read_bytes()):
        (suite,) = make_bundle(source, {"forward": [(X, X + 1)]}).method_test_suites
        (case,) = suite.test_cases
        found: list[Any] = [*case.inputs, *case.expected_outputs]
        for value, wanted in zip(found, (X, X + 1, 2 * X + 1), strict=True):
            assert bytes(value.data) == struct.pack("<4f", *wanted.flatten())
            assert (value.sizes, value.dim_order) == ([2, 2], [0, 1])


def test_memory_is_as_it_lies(method: Any) -> None:
    x, out = (method.tensor([1, 2, 2, 1], dim_order=[0, 2, 3, 1]) for _ in range(2))
    method.call("aten::neg.out", x, out, out)
    given = X.view(1, 2, 2, 1).contiguous(memory_format=torch.channels_last)
    bundle = make_bundle(method.ends([x], [out]), {"forward": [(given,)]})
    ((value,),) = ([*case.inputs] for case in _cases(bundle))
    assert value.dim_order == [0, 2, 3, 1]
    assert bytes(value.data) == struct.pack("<4f", 1, 3, -2, 4)


def test_each_case_begins_with_the_first_state(method: Any) -> None:
    x, out = method.tensor([1]), method.tensor([1])
    state = method.tensor([1], initial=torch.zeros(1), name="total", memory_id=2)
    method.call("aten::add.out", state, x, method.integer(1), state, state)
    method.call("aten::add.out", state, x, method.integer(1), out, out)
    program = method.ends([x], [out])
    one = torch.ones(1)
    bundle = make_bundle(program, {"forward": [(one,), (one,)]})
    results = [bytes(case.expected_outputs[0].data) for case in _cases(bundle)]
    assert results[0] == results[1]


def _cases(bundle: BundledProgram) -> list[Any]:
    return [case for suite in bundle.method_test_suites for case in suite.test_cases]


@pytest.mark.parametrize(
    ("cases", "expected", "error", "words"),
    [
        ({"other": [()]}, None, ProgramError, "there is no method 'other'"),
        ({"forward": [(X,)]}, None, InputError, "1 inputs by position"),
        (
            {"forward": [(X, X)]},
            {"forward": lambda x, y: (x, y)},
            InputError,
            "the function in expected returns 2 results, the program 1",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    program: Program, cases: Any, expected: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_bundle(program, cases, expected)
