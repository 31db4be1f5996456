"""``lowerdeck completion``: what shells complete, asked of the shells."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from typing import Any

import pytest

from lowerdeck.serializer.commands.completion import completion_script

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def _answers(script: str, *words: str) -> list[str]:
    """Return what bash completes the last word to."""
    asked = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({asked}); COMP_CWORD={len(words) - 1}; _lowerdeck"
    told = 'printf "%s\\n" "${COMPREPLY[@]}"'
    run = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{ask}; {told}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    return run.stdout.split()


@pytest.fixture
def script() -> str:
    look, model = argparse.ArgumentParser(), argparse.ArgumentParser()
    look.add_argument("file")
    look.add_argument("--memory", choices=["strict", "poison"])
    look.add_argument("--method")
    below = model.add_subparsers()
    below.add_parser("export").add_argument("--quantize", choices=["none", "8da4w"])
    below.add_parser("run")
    return completion_script("bash", {"look": look, "lm": model})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lo", ["look"]),
        ("", ["look", "lm", "--help", "--version"]),
        ("look --me", ["--memory", "--method"]),
        ("look file.pte --memory ", ["strict", "poison"]),
        ("look file.pte --memory p", ["poison"]),
        # Nothing of ours is left to the shell, which completes files.
        ("look fi", []),
        ("look --method ", []),
        ("lm ", ["export", "run"]),
        ("lm export --q", ["--quantize"]),
        ("lm export --quantize 8", ["8da4w"]),
        ("lm run --q", []),
        ("unknown --q", []),
    ],
)
def test_bash_completes(words: str, expected: list[str], script: str) -> None:
    assert _answers(script, "lowerdeck", *words.split(" ")) == expected


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_installed_commands_are_completed(name: str, shell: Any) -> None:
    told = shell("completion", name).out
    assert ("bashcompinit" in told) == (name == "zsh")
    rest = "".join(line for line in told.splitlines(True) if "compinit" not in line)
    assert _answers(rest, "lowerdeck", "inspect", "--ht") == ["--html"]
    assert rest.endswith("complete -o default -F _lowerdeck lowerdeck\n")


def test_another_shell_is_a_wrong_argument(shell: Any) -> None:
    assert "invalid choice: 'tcsh'" in shell("completion", "tcsh", status=2).err
