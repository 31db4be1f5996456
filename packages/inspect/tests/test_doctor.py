"""Reports of ``lowerdeck doctor`` about environments."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from lowerdeck.inspect.commands import doctor
from lowerdeck.inspect.commands.doctor import import_failures


class Installed(Distribution):
    """A distribution that no folder holds."""

    def __init__(self, name: str, version: str, commands: str = "") -> None:
        entries = [f"{command} = module:object" for command in commands.split()]
        self._files = {
            "METADATA": f"Name: {name}\nVersion: {version}\n",
            "entry_points.txt": "\n".join(["[lowerdeck.commands]", *entries]),
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


def diagnosis(
    monkeypatch: pytest.MonkeyPatch, shell: Any, *there: Installed, broken: str = ""
) -> tuple[int, list[str]]:
    monkeypatch.setattr(doctor, "distributions", lambda: there)
    # No folder holds these, so that nothing can be loaded.
    monkeypatch.setattr(
        doctor, "import_failures", lambda parts: dict.fromkeys(parts, broken) if broken else {}
    )
    printed = shell("doctor", status=None)
    return printed.status, printed.out.splitlines()


def test_what_is_here_is_told(shell: Any) -> None:
    printed = shell("doctor", status=None)
    assert printed.status in (0, 4)
    lines = printed.out.splitlines()
    assert lines[0].startswith("Python 3.")
    assert any(line.startswith("lowerdeck-serializer ") for line in lines)
    assert lines[-1].startswith("official runtime: ")


WHOLE = Installed("lowerdeck", "0.1.0")
XNNPACK = Installed("lowerdeck-xnnpack", "0.2.0", commands="lower")
TWO = [Installed("executorch", version) for version in ("1.5.1", "1.4.1")]
CASES: dict[str, tuple[list[Installed], list[str], str]] = {
    "the serializer alone": (
        [Installed("lowerdeck-serializer", "0.1.2")],
        [
            "lowerdeck-serializer 0.1.2",
        ],
        "official runtime: not installed, ",
    ),
    # Of two of one name the imported one counts, and a package without code is a part.
    "a package without code": (
        [WHOLE, Installed("lowerdeckhand", "9"), *TWO],
        [
            "lowerdeck 0.1.0",
        ],
        "official runtime: executorch 1.5.1",
    ),
    "extras": (
        [XNNPACK, Installed("executorch", "9.9"), Installed("ring", "1.0", commands="spin")],
        [
            "lowerdeck-xnnpack 0.2.0  (lowerdeck lower)",
            "ring 1.0  (lowerdeck spin)",
        ],
        "official runtime: executorch 9.9",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_installed_is_told(name: str, monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    there, first, runtime = CASES[name]
    status, lines = diagnosis(monkeypatch, shell, *there)
    assert status == 0
    assert lines[1 : 1 + len(first)] == first
    assert lines[-1].startswith(runtime)
    assert not any("lowerdeckhand" in line for line in lines)


def test_a_failing_import_is_reported(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    there = Installed("lowerdeck-x", "1", commands="lm")
    status, lines = diagnosis(monkeypatch, shell, there, broken="ImportError no")
    assert (status, lines[1]) == (4, "lowerdeck-x 1  (lowerdeck lm)")
    assert lines[2] == "  CANNOT BE IMPORTED: ImportError no"


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("import os; os._exit(7)", "importing it aborts the process with status 7"),
        ("import threading; threading.Event().wait()", "importing it takes more than 2 s"),
    ],
)
def test_each_import_fails_for_itself(
    last: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {
        "fine": "value = 1",
        "lacking": "import no_such_module_of_anybody",
        "raising": "raise RuntimeError('first line\\nsecond line')",
        "last": last,
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    targets = {"fine": ["fine"], "other": ["fine:value"], "no": ["fine:none"]}
    assert import_failures(targets | {name: [name] for name in modules}, seconds=2) == {
        "lacking": "ModuleNotFoundError No module named 'no_such_module_of_anybody'",
        "raising": "RuntimeError first line",
        "no": "AttributeError module 'fine' has no attribute 'none'",
        "last": end,
    }
