"""The script: what it offers, prints, writes and refuses."""

from __future__ import annotations

import ast
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck.inspect.commands.answers import size_text
from lowerdeck_files import DATA
from lowerdeck_files.programs import add_delegates, add_program, program, tensor


def _program(*, weight: bytes = struct.pack("<3f", 1.0, 2.0, 3.0), steps: int = 1) -> Any:
    values = [tensor((3,), index=1, name="../weight"), tensor((3,), at=0), tensor((3,), at=16)]
    calls = [*[("aten::add.out", [1, 0, 3, 2, 2])] * steps, pte.DelegateCall(0, [2, 2])]
    values.append(pte.EValue(pte.Int(1)))
    made = program(values, *calls, constants=[weight], memory=32, inputs=[1], outputs=[2])
    made.named_data = [pte.NamedData("a/key", b"named bytes")]
    return add_delegates(made, b"blob bytes", backend="SomeBackend", specs=[("speed", b"fast")])


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.pte"
    pte.write_pte(_program(), path)
    return path


def test_the_menu_and_an_unknown_command_list_the_commands(shell: Any) -> None:
    assert "inspect" in shell().out
    shown = shell("frobnicate", status=2).err
    assert all(word in shown for word in ("frobnicate", "inspect", "verify", "diff", "extract"))


def test_inspect_tells_what_a_person_wants_to_see(model: Path, shell: Any) -> None:
    page = model.with_name("report.html")
    shown = shell("inspect", model).out
    for text in ("forward", "float32[3]", "aten::add.out", "SomeBackend", "speed='fast'", "32 B"):
        assert text in shown
    assert "report.html" in shell("inspect", "--html", page, model).out
    assert page.read_text().startswith("<!doctype html>")


def test_inspect_counts_shared_bytes_once(model: Path, shell: Any) -> None:
    made = _program(weight=bytes(range(200)))
    made.named_data.append(pte.NamedData("tied", bytes(range(200))))
    pte.write_pte(made, model)
    rows = (
        shell("inspect", model).out.partition("sizes of the parts of the file\n")[2].splitlines()
    )
    assert sum(float(row.split()[2]) for row in rows) == pytest.approx(100, abs=0.3)
    assert any("named blobs (2), 200 B shared" in row for row in rows)


def test_inspect_json_is_stable_for_machines(model: Path, shell: Any) -> None:
    summary = json.loads(shell("inspect", "--json", model).out)
    assert summary["summary_version"] == 1
    assert summary["size"] == model.stat().st_size
    (method,) = summary["methods"]
    assert method["operators"] == {"aten::add.out": 1}
    assert method["planned_memory"] == [{"id": 1, "size": 32}]
    assert summary["constants"] == {"count": 1, "size": 12}
    assert [entry["size"] for entry in summary["delegates"]] == [10]
    assert sum(section["size"] for section in summary["sections"]) <= summary["size"]


def _without_delegate() -> Any:
    made = _program()
    made.execution_plan[0].delegates = []
    made.backend_delegate_data = []
    made.constant_buffer.append(pte.Buffer(b"nobody's"))
    return made


def _twice_delegated() -> Any:
    made = _program()
    made.execution_plan[0].delegates *= 2
    return made


@pytest.mark.parametrize(
    ("other", "options", "lines"),
    [
        (_program(), {}, ["no difference"]),
        # Where bytes are makes no difference.
        (_program(), {"segment_alignment": 4096}, ["no difference"]),
        (
            _program(weight=struct.pack("<3f", 9.0, 2.0, 3.0), steps=2),
            {},
            ["aten::add.out: 1 -> 2 calls", "weight"],
        ),
        (_without_delegate(), {}, ["SomeBackend", r"constants \d+: added, 0 B -> 8 B"]),
        (_twice_delegated(), {}, ["delegate added: SomeBackend"]),
    ],
)
def test_diff_says_each_thing_once(
    other: Any, options: dict[str, Any], lines: list[str], model: Path, shell: Any
) -> None:
    path = model.with_name("other.pte")
    pte.write_pte(other, path, **options)
    shown = shell("diff", model, path, status=lines != ["no difference"]).out.splitlines()
    for line in lines:
        assert len([one for one in shown if re.search(line, one)]) == 1, shown


def test_diff_compares_a_renamed_method(model: Path, shell: Any) -> None:
    other = _program()
    other.execution_plan[0].name = "encode"
    pte.write_pte(other, model.with_name("other.pte"))
    (line,) = shell("diff", model, model.with_name("other.pte"), status=1).out.splitlines()
    assert line == "method forward: renamed to encode; both are compared as forward"


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_diff_compares_the_structure_of_inputs_and_outputs(
    side: str, tmp_path: Path, shell: Any
) -> None:
    paths = [tmp_path / "a.pte", tmp_path / "b.pte"]
    for path, text in zip(paths, ("one\x1b", "two" + "x" * 1000), strict=True):
        made = add_program()
        texts = (text, "same") if side == "inputs" else ("same", text)
        made.execution_plan[0].container_meta_type = pte.ContainerMetadata(*texts)
        path.write_bytes(pte.serialize_pte(made))
    (line,) = shell("diff", *paths, status=1).out.splitlines()
    assert line.startswith(f"method forward: structure of {side}: one\\x1b -> two")
    assert len(line) < 600


def test_extract_writes_arrays_blobs_and_a_manifest(
    model: Path, tmp_path: Path, shell: Any
) -> None:
    folder = tmp_path / "parts"
    assert str(folder) in shell("extract", model, "-o", folder).out
    manifest = json.loads((folder / "manifest.json").read_text())
    by_name = {entry["name"]: entry for entry in manifest}
    assert (folder / by_name["SomeBackend"]["file"]).read_bytes() == b"blob bytes"
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


def test_verify_tells_right_from_wrong(tmp_path: Path, shell: Any) -> None:
    good, bad = tmp_path / "good.pte", tmp_path / "bad.pte"
    made = _program()
    pte.write_pte(made, good)
    made.execution_plan[0].outputs = [99]
    pte.write_pte(made, bad)
    shown = shell("verify", good, bad, status=3)
    assert shown.out == f"{good}: ok\n"
    assert "damaged: method 'forward'.outputs" in shown.err


@pytest.mark.parametrize(
    ("nbytes", "text"), [(999, "999 B"), (46_800_000, "46.8 MB"), (5 * 10**15, "5000.0 TB")]
)
def test_sizes_are_told_as_a_person_reads_them(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


OFFICIAL = DATA / "external_ptd.ptd"
PROGRAM = OFFICIAL.with_suffix(".pte")


def test_inspect_tells_the_entries_largest_first(shell: Any) -> None:
    lines = shell("inspect", OFFICIAL).out.splitlines()
    assert lines[0] == "external_ptd.ptd: 23.7 kB, external data, schema version 0, 11 entries"
    assert lines[2].split(maxsplit=4)[:4] == ["18.4", "kB", "77.8", "%"]
    assert lines[2].endswith("  float32[32, 16, 3, 3]  c2.weight")
    assert lines[-1].endswith("  int64[]                b1.num_batches_tracked")


def test_inspect_tells_machines(shell: Any) -> None:
    told = json.loads(shell("inspect", "--json", OFFICIAL).out)
    assert told["kind"] == "ptd"
    assert told["size"] == OFFICIAL.stat().st_size
    assert told["entries"][0] == {
        "key": "c2.weight",
        "size": 18432,
        "alignment": 128,
        "kind": "tensor",
        "text": "float32[32, 16, 3, 3]",
        "dtype": "float32",
        "sizes": [32, 16, 3, 3],
        "dim_order": [0, 1, 2, 3],
    }


def test_inspect_cuts_long_lists_and_shields_the_terminal(tmp_path: Path, shell: Any) -> None:
    path = tmp_path / "many.bin"  # the name tells nothing, the identifier does
    entries = {f"{i:02}": pte.ExternalEntry(bytes(4)) for i in range(24)}
    pte.write_ptd(entries | {"\x1b[2Jgone": pte.ExternalEntry(bytes(8))}, path)
    out = shell("inspect", path).out
    assert "\x1b" not in out
    assert "\\x1b[2Jgone" in out
    assert out.splitlines()[-1] == "    ... and 5 more (--json shows all)"


def test_empty_data_are_shown_and_have_no_page(tmp_path: Path, shell: Any) -> None:
    path = str(tmp_path / "none.ptd")
    pte.write_ptd({}, path)
    assert shell("inspect", path).out.splitlines()[0].endswith("0 entries")
    shell("verify", path)
    told = shell("inspect", path, "--html", tmp_path / "page.html", status=2).err
    assert "omit --html" in told
    assert [one.name for one in tmp_path.iterdir()] == ["none.ptd"]


def test_verify_takes_both_kinds(shell: Any) -> None:
    assert shell("verify", OFFICIAL, PROGRAM).out == f"{OFFICIAL}: ok\n{PROGRAM}: ok\n"


def test_verify_tells_whether_data_fit(tmp_path: Path, shell: Any) -> None:
    shell("verify", "-q", PROGRAM, "--data", OFFICIAL)
    other = tmp_path / "other.ptd"
    layout = pte.TensorLayout(pte.ScalarType.FLOAT, [2], [0])
    pte.write_ptd({"c2.weight": pte.ExternalEntry(bytes(8), layout)}, other)
    told = shell("verify", "-q", PROGRAM, "--data", other, status=3).err
    assert told.startswith(f"lowerdeck verify: {PROGRAM}: invalid: external data: ")


VALUES = [
    *(tensor((2, 2), at=0), tensor((3,), pte.ScalarType.LONG, 64), pte.Int(7)),
    *(pte.TensorList([1, 0]), pte.OptionalTensorList([-1, 0]), pte.OptionalTensorList([-1])),
    tensor((), pte.ScalarType.DOUBLE, 128),
]
CALLS = [("mine::cat.out", args) for args in ([3, 2, 0], [3, 2, 0], [4, 0], [5, 6], [2])]
KEYS = ["v1", "v1/4;0|6;0,1", "v1/6;0,1|6;0,1", "v1/7;"]


def shown(shell: Any, made: Any, *words: str) -> str:
    pte.write_pte(made, "model.pte")
    return str(shell(*words, "model.pte").out)


def test_each_way_of_calling_is_listed_once_and_names_stay_text(shell: Any) -> None:
    made = program(VALUES, *CALLS)
    odd = 'a: "b"\n- c'
    made.execution_plan[0].operators.append(pte.Operator(odd))
    build = json.loads(shown(shell, made, "ops", "--yaml"))
    assert build["et_kernel_metadata"] == {"mine::cat.out": KEYS}
    assert {*build["operators"]} == {"mine::cat.out", odd}
    assert build["operators"][odd]["is_root_operator"] is True
    assert all(key in shown(shell, made, "ops") for key in KEYS)


def test_a_file_without_calls_and_no_file(shell: Any) -> None:
    build = json.loads(shown(shell, program([]), "ops", "--yaml"))
    assert build["operators"] == build["et_kernel_metadata"] == {}
    Path("model.pte").write_bytes(b"nothing of the kind")
    assert "model.pte" in shell("ops", "model.pte", status=3).err


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("llama::custom_sdpa", "custom_ops"),
        ("quantized_decomposed::embedding_byte", "quantized_ops_lib"),
        ("mine::add", "the application's own"),
        ("aten::add", ""),
    ],
)
def test_kernels_beside_the_runtimes_are_named(name: str, library: str, shell: Any) -> None:
    made: pte.Program = add_program()
    made.execution_plan[0].operators[0] = pte.Operator(name, "out")
    libraries = json.loads(shown(shell, made, "inspect", "--json"))["kernel_libraries"]
    assert libraries == ({library: [f"{name}.out"]} if library else {})
    text = shown(shell, made, "inspect")
    assert (f"  {library}: {name}.out" in text) if library else ("must link" not in text)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_text_is_no_pte_file_and_a_wrong_offset_is_damage(
    command: str, tmp_path: Path, shell: Any
) -> None:
    text = tmp_path / "notes.pte"
    text.write_text("some notes\n")
    assert f"{text}: not a .pte file: " in shell(command, text, status=3).err
    damaged = tmp_path / "damaged.pte"
    data = bytearray(Path(OFFICIAL).read_bytes())
    data[0] ^= 0x80  # the offset of the root table
    damaged.write_bytes(data)
    assert f"{damaged}: damaged: " in shell(command, damaged, status=3).err
