"""Completion scripts of the installed commands, run by bash."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("insp", ["inspect"]),
        ("inspect --ht", ["--html"]),
        ("completion z", ["zsh"]),
        ("unknown --ht", []),
    ],
)
def test_bash_completes_installed_commands(words: str, expected: list[str], shell: Any) -> None:
    script = shell("completion", "bash").out
    parts = ["lowerdeck", *words.split(" ")]
    function = next(
        line.split()[-2] for line in script.splitlines() if line.startswith("complete")
    )
    run = subprocess.run(
        [
            *("bash", "--norc", "-c"),
            f"{script}\nCOMP_WORDS=({' '.join(parts)}); COMP_CWORD={len(parts) - 1}; {function}\n"
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == expected


def test_zsh_gets_a_script_of_its_own(shell: Any) -> None:
    assert shell("completion", "zsh").out.startswith("#compdef lowerdeck")


def test_another_shell_is_a_wrong_argument(shell: Any) -> None:
    assert "invalid choice: 'tcsh'" in shell("completion", "tcsh", status=2).err
