"""Programs with test cases, made and tried here."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import InputError, ProgramError, check_bundle, make_bundle
from lowerdeck.serializer import (
    BundledProgram,
    BundledTensor,
    Double,
    Int,
    Program,
    deserialize_bundle,
    serialize_bundle,
    serialize_pte,
    write_pte,
)

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
    assert [outcome.right for outcome in check_bundle(bundle)] == [True]


def test_outcomes_tell_what_is_wrong(program: Program) -> None:
    bundle = make_bundle(program, {"forward": [(X, X)] * 3}, {"forward": torch.add})
    assert [outcome.right for outcome in check_bundle(bundle)] == [True] * 3
    for number, value in ((1, 5.0), (2, math.nan)):
        expected: Any = bundle.method_test_suites[0].test_cases[number].expected_outputs[0]
        changed = torch.full((2, 2), value)
        expected.data = struct.pack("<4f", *changed.flatten())
    outcomes = check_bundle(serialize_bundle(bundle))
    assert [(one.method, one.number, one.right) for one in outcomes] == [
        ("forward", 0, True),
        ("forward", 1, False),
        ("forward", 2, False),
    ]
    assert [one.differences for one in outcomes] == [(0.0,), (9.0,), (math.inf,)]
    assert all(one.right for one in check_bundle(bundle, atol=9.0)[:2])


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
    assert all(outcome.right for outcome in check_bundle(bundle))


def _cases(bundle: BundledProgram) -> list[Any]:
    return [case for suite in bundle.method_test_suites for case in suite.test_cases]


@pytest.mark.parametrize(
    ("cases", "expected", "error", "words"),
    [
        ({"other": []}, None, ProgramError, "found test cases for other, expected only"),
        ({"forward": [(X,)]}, None, InputError, "1 inputs by position"),
        (
            {"forward": [(X, X)]},
            {"forward": lambda x, y: (x, y)},
            InputError,
            "2 results are expected; the program gives 1",
        ),
        (
            {"forward": [(X, X)]},
            {"forward": lambda x, y: (x + y).double()},
            InputError,
            "result 0 is torch.float64 of shape .2, 2.; the program gives torch.float32",
        ),
    ],
)
def test_what_does_not_fit_is_told(
    program: Program, cases: Any, expected: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_bundle(program, cases, expected)


def test_what_a_file_says_is_not_trusted(program: Program) -> None:
    with pytest.raises(ProgramError, match="no bundled program"):
        check_bundle(serialize_pte(program))
    bundle = make_bundle(program, {"forward": [(X, X)]})
    case = _cases(bundle)[0]
    case.inputs[1] = Int(3)
    with pytest.raises(InputError):
        check_bundle(bundle)
    case.inputs = [case.inputs[0], case.inputs[0], Double(1.0)]
    with pytest.raises(InputError):
        check_bundle(bundle)
    case.inputs = case.inputs[:2]
    case.expected_outputs = []
    with pytest.raises(InputError, match="expects 0 results; the method has 1"):
        check_bundle(bundle)
    assert isinstance(case.inputs[0], BundledTensor)


@pytest.fixture
def file(program: Program, tmp_path: Path) -> Path:
    path = tmp_path / "model.pte"
    write_pte(program, path)
    return path


def test_the_command_writes_and_tries(file: Path, tmp_path: Path, shell: Any) -> None:
    bundled, again = tmp_path / "model.bpte", tmp_path / "again.pte"
    said = shell("bundle", file, "-o", bundled, "--input", "ones", "--cases", 3).out
    assert "3 test cases of forward, results computed by the program itself" in said
    said = shell("bundle", bundled, "-o", again).out
    assert "forward, test case 2: right, off by up to 0\n3 test cases, 0 wrong" in said
    assert again.read_bytes() == file.read_bytes()
    first, second = _cases(deserialize_bundle(bundled.read_bytes()))[:2]
    # What is random differs from case to case.
    assert first.inputs[0] == second.inputs[0]
    assert first.inputs[1] != second.inputs[1]


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ([], 3, "found no --output"),
        (["-o", "x.bpte", "--cases", "2", "--expected", "r"], 3, "it holds the results of one"),
        (["-o", "model.pte"], 2, "model.pte"),
        (["-o", "x.bpte", "--rtol", "nan"], 2, "nan"),
        (["-o", "no/x.bpte"], 4, "no/x.bpte"),
    ],
)
def test_wrong_words_are_told_in_a_line(
    file: Path, words: list[str], status: int, told: str, monkeypatch: Any, shell: Any
) -> None:
    monkeypatch.chdir(file.parent)
    assert told in shell("bundle", "model.pte", *words, status=status).err
    assert not Path("x.bpte").exists()


def test_results_are_given_in_a_file(file: Path, tmp_path: Path, shell: Any) -> None:
    bundled, results = tmp_path / "model.bpte", tmp_path / "results"
    torch.save([torch.full((2, 2), 2.5)], results)
    words = ["bundle", file, "--input", "ones", "--input", "ones", "-o", bundled]
    assert "results given" in shell(*words, "--expected", results).out
    assert "test case 0: WRONG, off by up to 0.5" in shell("bundle", bundled, status=1).out
    shell("bundle", bundled, "--atol", "0.5")
