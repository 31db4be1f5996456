"""``lowerdeck completion``: what shells complete, asked of the shells."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lowerdeck.script import main
from lowerdeck.serializer.commands.completion import completion_script

pty = pytest.importorskip("pty", reason="there are no terminals as of POSIX here")


def _answers(script: str, *words: str) -> list[str]:
    """Return what bash completes the last word to."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
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


def _typed(shell: list[str], script: Path, keys: str) -> str:
    """Return what `lowerdeck` is called with when somebody types, Tab and Enter included."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    pid, terminal = pty.fork()
    if not pid:
        os.execvp(shell[0], shell)
    # A function instead of the command tells what arrived.
    told = 'lowerdeck() { echo "got<$*>"; exit; }'
    os.write(terminal, f". {script}; {told}; PS1=ready\\>\n".encode())
    shown, typed = b"", False
    with contextlib.suppress(OSError):  # which is how a terminal ends
        while part := os.read(terminal, 4096):
            shown += part
            # Before the shell asks, a terminal takes Tab for a letter.
            if not typed and b"ready>" in shown:
                os.write(terminal, f"{keys}\n".encode())
                typed = True
    os.close(terminal)
    os.waitpid(pid, 0)
    (found,) = re.findall(r"got<([^$>]*)>", shown.decode(errors="replace"))
    return str(found)


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


@pytest.mark.parametrize(
    ("shell", "command"), [("bash", ["bash", "--norc", "-i"]), ("zsh", ["zsh", "-f", "-i"])]
)
@pytest.mark.parametrize(
    ("keys", "called_with"),
    [
        ("lowerdeck inspect --ht\tout", "inspect --html out"),
        ("lowerdeck verify some.p\t", "verify some.pte "),
    ],
)
def test_a_shell_completes_what_is_typed(
    shell: str,
    command: list[str],
    keys: str,
    called_with: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "some.pte").touch()
    monkeypatch.chdir(tmp_path)
    assert _typed(command, script, keys) == called_with.rstrip()


def test_another_shell_is_a_wrong_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
