"""What ``lowerdeck doctor`` says of environments."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from lowerdeck.script import main
from lowerdeck.serializer.commands import doctor
from lowerdeck.serializer.commands.loading import Failure, failures


class Installed(Distribution):
    """A distribution that no folder holds."""

    def __init__(self, name: str, version: str, *requires: str, commands: str = "") -> None:
        lines = [f"Name: {name}", f"Version: {version}"]
        entries = [f"{command} = module:object" for command in commands.split()]
        self._files = {
            "METADATA": "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires), ""]),
            "entry_points.txt": "\n".join(["[lowerdeck.commands]", *entries]),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


def diagnosis(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *there: Installed,
    broken: Failure | None = None,
) -> tuple[int, list[str]]:
    monkeypatch.setattr(doctor, "distributions", lambda: there)
    # No folder holds these, so that nothing can be loaded.
    monkeypatch.setattr(
        doctor, "failures", lambda parts: dict.fromkeys(parts, broken) if broken else {}
    )
    status = main(["doctor"])
    return status, capsys.readouterr().out.splitlines()


def test_what_is_here_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Python 3.")
    assert any(line.startswith("lowerdeck-serializer ") for line in lines)
    assert lines[-1].startswith("official runtime: ")


def test_a_serializer_alone_lacks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = diagnosis(monkeypatch, capsys, Installed("lowerdeck-serializer", "0.1.2"))
    assert status == 0
    assert lines[1:] == [
        "lowerdeck-serializer 0.1.2",
        "no `lowerdeck lower`: pip install lowerdeck-lowered-module",
        "no `lowerdeck run`: pip install lowerdeck-runner",
        "no `lowerdeck bundle`: pip install lowerdeck-runner",
        "no `lowerdeck backends`: pip install lowerdeck-runner",
        "no `lowerdeck lm`: pip install lowerdeck-language-models",
        "official runtime: not installed, so that files run in lowerdeck-runner alone, which "
        "emulates it: pip install executorch",
    ]


def test_of_two_of_a_name_the_imported_one_counts_and_a_package_without_code_is_a_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two = [Installed("executorch", version) for version in ("1.5.1", "1.4.1")]
    whole = Installed("lowerdeck", "0.1.0", 'lowerdeck-openvino>=0.1; extra == "openvino"')
    there = whole, Installed("lowerdeckhand", "9"), *two
    status, lines = diagnosis(monkeypatch, capsys, *there)
    assert lines[-1].startswith("official runtime: executorch 1.5.1")
    assert status == 0
    assert lines[1:3] == [
        "lowerdeck 0.1.0",
        "  for [openvino]: lowerdeck-openvino>=0.1: pip install 'lowerdeck-openvino>=0.1'",
    ]
    assert not any("lowerdeckhand" in line for line in lines)


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("2.13", ">=2.13.0", True),
        ("2.9.1", ">=2.13", False),
        ("0.1.3", "<0.2,>=0.1.2", True),
        ("0.2.0", "<0.2,>=0.1.2", False),
        ("0.2.0rc1", "(>=0.1)", True),
        ("1.0", "", True),
    ],
)
def test_versions_keep_their_bounds(
    version: str,
    bounds: str,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = (Installed("lowerdeck-x", "1", f"Torch_X {bounds}"), Installed("torch-x", version))
    status, lines = diagnosis(monkeypatch, capsys, *there)
    assert status == (0 if fits else 4)
    missing = [line for line in lines if "MISSING" in line]
    assert len(missing) == (not fits)
    assert all(f"found {version}: pip install" in line for line in missing)


def test_what_extras_and_other_systems_ask_for_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Installed(
        "lowerdeck-xnnpack",
        "0.2.0",
        'torchao>=0.18; extra == "quantize"',
        'winsome; sys_platform == "win32"',
        commands="lower",
    )
    status, lines = diagnosis(monkeypatch, capsys, one, Installed("executorch", "9.9"))
    assert status == 0
    assert lines[1] == "lowerdeck-xnnpack 0.2.0  (lowerdeck lower)"
    assert lines[2] == "  for [quantize]: torchao>=0.18: pip install 'torchao>=0.18'"
    assert not any("winsome" in line or "`lowerdeck lower`" in line for line in lines)
    assert lines[-1].startswith("official runtime: executorch 9.9, ")
    assert lines[-1].endswith("which needs torch: pip install torch")


@pytest.mark.parametrize(
    ("reason", "culprit", "told"),
    [
        ("ModuleNotFoundError: No module named 'a.b'", "", "'a.b'; pip install a"),
        (
            *("RuntimeError: operator torchvision::nms does not exist", "torchvision"),
            "does not exist, raised by torchvision 0.29.0 beside torch 2.13.0; install versions "
            "that fit each other",
        ),
        ("importing it did not end within 120 s", "", "120 s; pip install --force-reinstall"),
    ],
)
def test_a_part_that_cannot_be_loaded_is_no_part_that_is_there(
    reason: str,
    culprit: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = (
        Installed("lowerdeck-x", "1", commands="lm"),
        Installed("torch", "2.13.0"),
        Installed("torchvision", "0.29.0"),
    )
    status, lines = diagnosis(monkeypatch, capsys, *there, broken=Failure(reason, culprit))
    assert status == 4
    assert lines[1] == "lowerdeck-x 1  (lowerdeck lm)"
    assert lines[2].startswith(f"  INSTALLED BUT CANNOT BE LOADED: {reason}")
    assert told in lines[2]


def test_whatever_an_import_does_is_told_of_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {
        "fine": "print('[1, 2]'); value = 1",
        "lacking": "import no_such_module_of_anybody",
        "wrapped": "try:\n import raising\nexcept Exception as e:\n raise ImportError from e",
        "raising": "raise RuntimeError('first line\\nsecond line')",
        "leaving": "raise SystemExit(3)",
        "ending": "import os; os._exit(7)",
        "endless": "import threading; threading.Event().wait()",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {name: [name] for name in modules} | {"other": ["fine:value"], "no": ["fine:none"]}
    found = failures(parts, seconds=4)
    assert {name: one.reason for name, one in found.items()} == {
        "lacking": "ModuleNotFoundError: No module named 'no_such_module_of_anybody'",
        "wrapped": "RuntimeError: first line",
        "raising": "RuntimeError: first line",
        "leaving": "SystemExit: 3",
        "ending": "importing it ends the process with status 7",
        "no": "AttributeError: module 'fine' has no attribute 'none'",
        "endless": "importing it did not end within 4 s",
    }
    assert found["wrapped"].culprit == "raising"
