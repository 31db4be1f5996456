"""``inspect`` names the kernels that an application must link for a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck.script import main
from lowerdeck.serializer import Operator, write_pte


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, list[str]]]:
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", "--json", str(path)]) == 0
    return text, json.loads(capsys.readouterr().out)["kernel_libraries"]


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("llama::custom_sdpa", "custom_ops"),
        ("quantized_decomposed::embedding_byte", "quantized_ops_lib"),
        ("mine::add", "the application's own"),
    ],
)
def test_kernels_beside_the_runtimes_are_named(
    name: str, library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = add_program()
    program.execution_plan[0].operators[0] = Operator(name, "out")
    path = tmp_path / "model.pte"
    write_pte(program, path)
    text, libraries = shown(path, capsys)
    assert libraries == {library: [f"{name}.out"]}
    assert f"  {library}: {name}.out" in text


def test_a_file_of_the_runtimes_kernels_needs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pte"
    write_pte(add_program(), path)
    text, libraries = shown(path, capsys)
    assert libraries == {}
    assert "must link" not in text
