"""``lowerdeck ops`` lists what a file calls, ``inspect`` the libraries that it must link."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serializer_programs import add_program, program, tensor  # type: ignore[import-not-found]

from lowerdeck.script import main
from lowerdeck.serializer import (
    Int,
    Operator,
    OptionalTensorList,
    Program,
    ScalarType,
    TensorList,
    write_pte,
)

VALUES = [
    *(tensor((2, 2), at=0), tensor((3,), ScalarType.LONG, 64), Int(7), TensorList([1, 0])),
    *(OptionalTensorList([-1, 0]), OptionalTensorList([-1]), tensor((), ScalarType.DOUBLE, 128)),
]
CALLS = [("mine::cat.out", args) for args in ([3, 2, 0], [3, 2, 0], [4, 0], [5, 6], [2])]
KEYS = ["v1", "v1/4;0|6;0,1", "v1/6;0,1|6;0,1", "v1/7;"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "model.pte"]) == 0
    return capsys.readouterr().out


def test_each_way_of_calling_is_listed_once_and_names_stay_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = program(VALUES, *CALLS)
    odd = 'a: "b"\n- c'
    made.execution_plan[0].operators.append(Operator(odd))
    write_pte(made, "model.pte")
    lines = shown(capsys, "ops", "--yaml").splitlines()
    assert lines.count(f"  {json.dumps(odd)}:") == 1
    first = lines.index('  "mine::cat.out":', lines.index("et_kernel_metadata:"))
    assert [line.strip("- \"'") for line in lines[first + 1 : first + 5]] == KEYS
    assert all(key in shown(capsys, "ops") for key in KEYS)


def test_a_file_without_calls_and_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_pte(program([]), "model.pte")
    lines = shown(capsys, "ops", "--yaml").splitlines()
    assert {"operators: {}", "et_kernel_metadata: {}"} <= set(lines)
    Path("model.pte").write_bytes(b"nothing of the kind")
    assert main(["ops", "model.pte"]) == 3
    assert "model.pte" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("llama::custom_sdpa", "custom_ops"),
        ("quantized_decomposed::embedding_byte", "quantized_ops_lib"),
        ("mine::add", "the application's own"),
        ("aten::add", ""),
    ],
)
def test_kernels_beside_the_runtimes_are_named(
    name: str, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Program = add_program()
    made.execution_plan[0].operators[0] = Operator(name, "out")
    write_pte(made, "model.pte")
    libraries = json.loads(shown(capsys, "inspect", "--json"))["kernel_libraries"]
    assert libraries == ({library: [f"{name}.out"]} if library else {})
    text = shown(capsys, "inspect")
    assert (f"  {library}: {name}.out" in text) if library else ("must link" not in text)
