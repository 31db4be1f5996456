"""The script: what it offers, prints, writes and refuses."""

from __future__ import annotations

import ast
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck.script import main
from lowerdeck.serializer import (
    AllocationDetails,
    BackendDelegate,
    BackendDelegateDataReference,
    BackendDelegateInlineData,
    Buffer,
    Chain,
    CompileSpec,
    ContainerMetadata,
    DataLocation,
    DelegateCall,
    EValue,
    ExecutionPlan,
    ExtraTensorInfo,
    Instruction,
    Int,
    KernelCall,
    NamedData,
    Operator,
    Program,
    ScalarType,
    Tensor,
    serialize_pte,
    write_pte,
)
from lowerdeck.serializer.commands.sizes import size_text


def _program(*, weight: bytes = struct.pack("<3f", 1.0, 2.0, 3.0), steps: int = 1) -> Program:
    tensors = [
        Tensor(ScalarType.FLOAT, sizes=[3], dim_order=[0], data_buffer_idx=1),
        Tensor(ScalarType.FLOAT, sizes=[3], dim_order=[0]),
        Tensor(ScalarType.FLOAT, sizes=[3], dim_order=[0]),
    ]
    tensors[0].extra_tensor_info = ExtraTensorInfo(fully_qualified_name="../weight")
    tensors[1].allocation_info = AllocationDetails.at(1, 0)
    tensors[2].allocation_info = AllocationDetails.at(1, 16)
    plan = ExecutionPlan(
        "forward",
        values=[*map(EValue, tensors), EValue(Int(1))],
        inputs=[1],
        outputs=[2],
        chains=[
            Chain(
                instructions=[
                    *[Instruction(KernelCall(0, [1, 0, 3, 2, 2])) for _ in range(steps)],
                    Instruction(DelegateCall(0, [2, 2])),
                ]
            )
        ],
        operators=[Operator("aten::add", "out")],
        delegates=[
            BackendDelegate(
                "SomeBackend",
                BackendDelegateDataReference(DataLocation.INLINE, 0),
                [CompileSpec("speed", b"fast")],
            )
        ],
        non_const_buffer_sizes=[0, 32],
    )
    return Program(
        execution_plan=[plan],
        constant_buffer=[Buffer(b""), Buffer(weight)],
        backend_delegate_data=[BackendDelegateInlineData(b"blob bytes")],
        named_data=[NamedData("a/key", b"named bytes")],
    )


@pytest.fixture
def pte(tmp_path: Path) -> Path:
    path = tmp_path / "model.pte"
    write_pte(_program(), path)
    return path


def test_the_menu_lists_own_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name in ("inspect", "verify", "diff", "extract"):
        assert name in shown


def test_an_unknown_command_is_answered_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["frobnicate"])
    assert stop.value.code == 2
    assert "frobnicate" in (shown := capsys.readouterr().err)
    assert "inspect" in shown


def test_inspect_tells_what_a_person_wants_to_see(
    pte: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(pte)]) == 0
    shown = capsys.readouterr().out
    for text in ("forward", "float32[3]", "aten::add.out", "SomeBackend", "speed='fast'", "32 B"):
        assert text in shown


def test_inspect_json_is_stable_for_machines(
    pte: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--json", str(pte)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["summary_version"] == 1
    assert summary["size"] == pte.stat().st_size
    (method,) = summary["methods"]
    assert method["operators"] == {"aten::add.out": 1}
    assert method["planned_memory"] == [{"id": 1, "size": 32}]
    assert summary["constants"] == {"count": 1, "size": 12}
    assert [entry["size"] for entry in summary["delegates"]] == [10]
    assert sum(section["size"] for section in summary["sections"]) <= summary["size"]


def test_inspect_html_writes_one_page(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["inspect", "--html", str(page), str(pte)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_inspect_never_imports_torch_or_numpy(pte: Path) -> None:
    code = (
        "import sys; from lowerdeck.script import main;"
        f"main(['inspect', {str(pte)!r}]); print({{'torch', 'numpy'}} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", ["inspect", "extract"])
def test_a_broken_file_gets_one_line_and_status_3(
    command: str, pte: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pte.write_bytes(pte.read_bytes()[:40])
    assert main([command, str(pte)]) == 3
    assert capsys.readouterr().err.startswith(f"lowerdeck {command}: {pte}: ")
    assert [path.name for path in pte.parent.iterdir()] == ["model.pte"]


def test_diff_of_a_file_with_itself_finds_nothing(
    pte: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(pte), str(pte)]) == 0
    assert "no difference" in capsys.readouterr().out


def test_diff_ignores_where_bytes_are(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pte"
    write_pte(_program(), other, segment_alignment=4096)
    assert other.read_bytes() != pte.read_bytes()
    assert main(["diff", str(pte), str(other)]) == 0
    assert "no difference" in capsys.readouterr().out


def test_diff_names_what_changed(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pte"
    write_pte(_program(weight=struct.pack("<3f", 9.0, 2.0, 3.0), steps=2), other)
    assert main(["diff", str(pte), str(other)]) == 1
    shown = capsys.readouterr().out
    assert "aten::add.out: 1 -> 2 calls" in shown
    assert "weight" in shown


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_diff_compares_the_structure_of_inputs_and_outputs(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.pte", tmp_path / "b.pte"]
    for path, text in zip(paths, ("one\x1b", "two" + "x" * 1000), strict=True):
        program = add_program()
        texts = (text, "same") if side == "inputs" else ("same", text)
        program.execution_plan[0].container_meta_type = ContainerMetadata(*texts)
        path.write_bytes(serialize_pte(program))
    assert main(["diff", *map(str, paths)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"method forward: structure of {side}: one\\x1b -> two")
    assert len(line) < 600


def test_diff_says_each_thing_once(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _program()
    program.execution_plan[0].delegates = []
    program.backend_delegate_data = []
    program.constant_buffer.append(Buffer(b"nobody's"))
    other = tmp_path / "other.pte"
    write_pte(program, other)
    main(["diff", str(pte), str(other)])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "SomeBackend" in line]) == 1
    assert any(re.match(r"constants \d+: added, 0 B -> 8 B", line) for line in lines), lines


def test_extract_writes_arrays_blobs_and_a_manifest(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "parts"
    assert main(["extract", str(pte), "-o", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    manifest = json.loads((folder / "manifest.json").read_text())
    by_name = {entry["name"]: entry for entry in manifest}
    assert (folder / by_name["forward-SomeBackend"]["file"]).read_bytes() == b"blob bytes"
    assert (folder / by_name["a/key"]["file"]).read_bytes() == b"named bytes"
    array = (folder / by_name["../weight"]["file"]).read_bytes()
    assert array[:8] == b"\x93NUMPY\x01\x00"
    (length,) = struct.unpack_from("<H", array, 8)
    assert (10 + length) % 64 == 0
    header = ast.literal_eval(array[10 : 10 + length].decode())
    assert header == {"descr": "<f4", "fortran_order": False, "shape": (3,)}
    assert struct.unpack("<3f", array[10 + length :]) == (1.0, 2.0, 3.0)
    # The hostile name stayed inside the folder.
    assert all((folder / entry["file"]).resolve().is_relative_to(folder) for entry in manifest)


def test_extract_leaves_an_existing_folder_alone(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    assert main(["extract", str(pte), "-o", str(folder)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_verify_tells_right_from_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.pte", tmp_path / "bad.pte"
    program = _program()
    write_pte(program, good)
    program.execution_plan[0].outputs = [99]
    write_pte(program, bad)
    assert main(["verify", str(good), str(bad)]) == 3
    shown = capsys.readouterr()
    assert shown.out == f"{good}: ok\n"
    assert "IndexRangeError: method 'forward'.outputs" in shown.err


def test_diff_counts_delegates_that_look_alike(
    pte: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = _program()
    program.execution_plan[0].delegates *= 2
    other = tmp_path / "other.pte"
    write_pte(program, other)
    assert main(["diff", str(pte), str(other)]) == 1
    assert capsys.readouterr().out.count("delegate added: SomeBackend") == 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (46_800_000, "46.8 MB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_are_told_as_a_person_reads_them(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
