"""The command ``lowerdeck run``."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import load
from lowerdeck.runner.commands import BackendsCommand
from lowerdeck.serializer import write_pte


@pytest.fixture
def file(method: Any, tmp_path: Path) -> Path:
    x, y, out = method.tensor([2, 2]), method.tensor([2, 2]), method.tensor([2, 2])
    method.call("aten::add.out", x, y, method.integer(1), out, out)
    method.call("aten::mul.Scalar_out", out, method.double(1.0), out, out)
    path = tmp_path / "model.pte"
    write_pte(method.ends([x, y], [out]), path)
    return path


def test_a_run_shows_results(file: Path, shell: Any) -> None:
    out = shell("run", file, "--input", "ones", "--input", "zeros:2x2").out
    assert "output 0: float32[2x2] = [1, 1, 1, 1], min 1, mean 1, max 1" in out
    assert "ms a call in lowerdeck.runner, which emulates the runtime" in out
    assert "random" not in out
    out = shell("run", file, "--input", "ones", "--seed", "3").out
    assert "no --input for input 1: random (seed 3)\n" in out


def test_without_the_official_runtime_no_emulation_refuses(
    file: Path, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = shell("run", file, "--no-emulation", status=4)
    assert told.out == ""
    assert told.err.startswith("lowerdeck run: the official runtime is not installed")
    assert "pip install --no-deps executorch" in told.err


def test_random_inputs_depend_on_the_seed_only(file: Path, tmp_path: Path, shell: Any) -> None:
    results = []
    for seed in ("1", "1", "2"):
        shell("run", file, "--seed", seed, "--output", tmp_path / "o")
        results.append(torch.load(tmp_path / "o")[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_inputs_come_from_files(file: Path, tmp_path: Path, shell: Any) -> None:
    saved = tmp_path / "inputs.pt"
    torch.save([torch.ones(2, 2), torch.full((2, 2), 4.0)], saved)
    assert "[5, 5, 5, 5]" in shell("run", file, "--input", saved).out
    torch.save(torch.full((2, 2), 7.0), saved)
    assert "[8, 8, 8, 8]" in shell("run", file, "--input", saved, "--input", "ones").out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello, no pickle", "bad.pt cannot be loaded; expected a torch.save file"),
        (b"", "bad.pt cannot be loaded; expected a torch.save file"),
        (torch.nn.Identity(), "bad.pt cannot be loaded; expected a torch.save file"),
        ({"a": 1}, "inputs[0] is a dict; expected a tensor"),
        ([torch.ones(2, 2)] * 3, "3 inputs given; the method takes 2"),
        (torch.ones(1, 2), "inputs[0] has shape [1, 2]; expected [2, 2]"),
    ],
    ids=repr,
)
def test_a_file_of_inputs_that_does_not_fit_is_refused(
    file: Path, content: object, message: str, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    if isinstance(content, bytes):
        Path("bad.pt").write_bytes(content)
    else:
        torch.save(content, "bad.pt")
    (line,) = shell("run", file, "--input", "bad.pt", status=3).err.splitlines()
    assert message in line


def test_profile_and_trace(file: Path, tmp_path: Path, shell: Any) -> None:
    trace = tmp_path / "trace.json"
    out = shell("run", file, "--profile", "--trace", trace).out
    assert "aten::add.out" in out
    assert str(trace) in out
    assert len(json.loads(trace.read_text())["traceEvents"]) == 2


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--input ones:3x3", 3, "has shape [3, 3]"),
        ("--input ones:x", 3, "invalid shape"),
        ("--input ones:2", 3, "has shape [2]; expected at most [2, 2]"),
        ("--input ones:999999999x999999999", 3, "has shape [999999999, 999999999]"),
        ("--input what", 3, "neither a file nor a valid value"),
        ("--input ones --input ones --input ones", 3, "3 inputs given; the method takes 2"),
        ("--data no/such/file.ptd", 3, "no/such/file.ptd: No such file"),
        ("--data /", 3, "run: /: Is a directory"),
        ("--data text", 3, "external data text cannot be used"),
        ("--method backward", 3, "there is no method 'backward'"),
        ("--output no/such/folder/o", 4, "there is no folder no/such/folder"),
        ("--trace no/such/folder/o", 4, "there is no folder no/such/folder"),
        # Before anything runs in the official runtime.
        ("--no-emulation --profile", 2, "need emulation: remove them"),
        ("--no-emulation --memory poison", 2, "need emulation"),
        ("--no-emulation --method nope", 3, "no method 'nope'; the program has forward"),
        ("--no-emulation --input ones:9x9", 3, "expected at most [2, 2]"),
        # An output that is another file of the command.
        ("--output model.pte", 2, "--output model.pte is the file that FILE model.pte"),
        ("--trace hard.pte", 2, "--trace hard.pte is the file that FILE model.pte"),
        ("--data text --trace ./text", 2, "--trace text is the file that --data text"),
        ("--input ones --input x.pt --output soft.pt", 2, "soft.pt is the file that --input x.pt"),
        ("--trace new --output ./new", 2, "--trace new is the file that --output new"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_no_file(
    file: Path, words: str, status: int, message: str, shell: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(file.parent)
    Path("hard.pte").hardlink_to("model.pte")
    Path("text").write_bytes(b"data")
    torch.save(torch.ones(2, 2), "x.pt")
    Path("soft.pt").symlink_to("x.pt")
    before = {path: path.read_bytes() for path in Path().iterdir()}
    (line,) = shell("run", "model.pte", *words.split(), status=status).err.splitlines()
    assert line.startswith("lowerdeck run: ")
    assert message in line
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


@pytest.mark.parametrize(
    "words",
    [
        ["--repeat", "-1"],
        ["--repeat", "0"],
        ["--repeat", "two"],
        ["--repeat", "9" * 5000],
        ["--seed", "x"],
        ["--memory", "loose"],
        [],
    ],
)
def test_wrong_options_are_usage_errors(file: Path, words: list[str], shell: Any) -> None:
    assert "usage:" in shell("run", *([file, *words] if words else []), status=2).err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, "does not fit torch.int64") for text in ("1e400", str(10**30), "NaN")),
        (f"ones:{'9' * 5000}", "one such as 2x3"),
        (f"zeros:2x{'9' * 4000}", "one such as 2x3"),
        ("rand:2\u00d74", "one such as 2x3"),
        ("ones:-1", "one such as 2x3"),
        ("ones:2x", "one such as 2x3"),
        ("9" * 5000, "neither a file nor a valid value"),
        ("9" * 4000, "does not fit"),
        ("a" * 5000, "neither a file nor a valid value"),
        ("no\0file", "neither a file nor a valid value"),
    ],
    ids=range(12),
)
def test_inputs_of_any_length_are_bad_input_in_a_short_line(
    method: Any, tmp_path: Path, text: str, told: str, shell: Any
) -> None:
    x = method.tensor([] if "fit torch" in told else [2], torch.int64)
    path = tmp_path / "model.pte"
    write_pte(method.ends([x], [x]), path)
    error = shell("run", path, "--input", text, status=3).err
    assert told in error
    assert len(error) < 900
    assert len(error.splitlines()) == 1


EVIL = "a\x1b[31m\x07\x9b2J\u202e\r\nlowerdeck: all is well\u00e9"


@pytest.mark.parametrize(
    ("encoding", "words"), [("ascii", ["--profile"]), ("utf-8", ["--method", "x"])]
)
def test_names_from_a_file_are_printed_harmlessly(
    build: Any, tmp_path: Path, encoding: str, words: list[str]
) -> None:
    m = build.method(EVIL)
    x, out = m.tensor([2]), m.tensor([2])
    m.call("aten::neg.out", x, out, out)
    path = tmp_path / f"{EVIL}.pte"
    write_pte(m.ends([x], [out, m.string(EVIL)]), path)
    code = (
        "import sys; from importlib.metadata import entry_points;"
        "(script,) = entry_points(group='console_scripts', name='lowerdeck');"
        "sys.exit(script.load()(['run', *sys.argv[1:]]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path), *words],
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    told = done.stdout + done.stderr
    assert b"Traceback" not in told
    assert done.returncode == (3 if "x" in words else 0)
    for line in told.decode(encoding.partition(":")[0]).split("\n"):
        assert line.isprintable()
        assert not line.startswith("lowerdeck: all")
    assert b"a\\x1b[31m" in told


def test_a_missing_or_broken_file_is_one_line(tmp_path: Path, shell: Any) -> None:
    broken = tmp_path / "broken.pte"
    broken.write_bytes(b"x" * 100)
    for path in (tmp_path / "none.pte", broken):
        (line,) = shell("run", path, status=3).err.splitlines()
        assert str(path) in line


def test_backends_are_listed_with_their_operators(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [
        EntryPoint("Whole", "lowerdeck.runner:load", "lowerdeck.backends"),
        EntryPoint("Whole", "lowerdeck.runner:load", "lowerdeck.runtimes"),
        EntryPoint("Broken", "no_such_module:Backend", "lowerdeck.backends"),
    ]
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda **wanted: EntryPoints(entries).select(**wanted)
    )
    monkeypatch.setattr(load, "supported_operators", lambda: ["aten.mul"], raising=False)
    assert BackendsCommand().run(Namespace(operators=True)) == 0
    out = capsys.readouterr().out
    assert "Whole compiles, runs  (an unknown distribution)\n  aten.mul\n" in out
    assert "Broken compiles  (" in out
    assert "compiles: CANNOT BE IMPORTED: ModuleNotFoundError" in out
