"""What ``lowerdeck doctor`` says of environments."""

from __future__ import annotations

from email.message import Message
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from typing import Any

import pytest

from lowerdeck.serializer.command_line import main
from lowerdeck.serializer.commands import doctor


class Installed(Distribution):
    """A distribution that no folder holds."""

    def __init__(self, name: str, version: str, *requires: str, commands: str = "") -> None:
        self.told = Message()
        self.told["Name"], self.told["Version"] = name, version
        self.wants = list(requires)
        self.names = commands.split()

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: Any) -> Any:
        return path

    @property
    def metadata(self) -> Any:
        return self.told

    @property
    def requires(self) -> list[str]:
        return self.wants

    @property
    def entry_points(self) -> EntryPoints:
        group = "lowerdeck.commands"
        return EntryPoints(EntryPoint(name, "module:object", group) for name in self.names)


def diagnosis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *there: Installed
) -> tuple[int, list[str]]:
    monkeypatch.setattr(doctor, "distributions", lambda: there)
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
        "no `lowerdeck lm`: pip install lowerdeck-language-models",
        "official runtime: not installed, so that files run in lowerdeck-runner alone, which "
        "emulates it: pip install executorch",
    ]


def test_the_distribution_without_code_is_a_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Installed("lowerdeck", "0.1.0", 'lowerdeck-openvino>=0.1; extra == "openvino"')
    status, lines = diagnosis(monkeypatch, capsys, whole, Installed("lowerdeckhand", "9"))
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
