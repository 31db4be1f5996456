"""Answers of commands: to bad input, to names that attack a terminal, on any output."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowerdeck import serializer as pte
from lowerdeck.inspect import CommandError, ExitStatus, check_paths, command_line
from lowerdeck_files.programs import add_delegates, add_program

_EVIL = "\x1b[2J\x9b31m\u202egnp.exe\r\nlowerdeck: ok\x07\u2028\u200b"
_COMMANDS = ("inspect", "verify", "diff", "extract")


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Take Ctrl-C as in a terminal: processes that are started in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _hostile(path: Path) -> Path:
    """Write a program in which every name attacks the terminal."""
    program = add_program()
    specs = [(f"k{_EVIL}", _EVIL.encode())]
    add_delegates(program, _EVIL.encode(), backend=f"b{_EVIL}", specs=specs)
    plan = program.execution_plan[0]
    plan.name = f"m{_EVIL}"
    plan.operators[0] = pte.Operator(f"aten::{_EVIL}", _EVIL)
    weight = plan.values[1].val
    assert isinstance(weight, pte.Tensor)
    weight.extra_tensor_info = pte.ExtraTensorInfo(fully_qualified_name=f"w{_EVIL}")
    program.named_data = [pte.NamedData(f"n{_EVIL}", b"named")]
    pte.write_pte(program, path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Return files that are good, and all kinds that are not."""
    names = ("good.pte", "good.ptd", "cut.pte", "cut.ptd", "empty", "text", "folder", "no")
    found = {name: tmp_path / name for name in names}
    pte.write_pte(add_program(), found["good.pte"])
    pte.write_ptd({"w": pte.ExternalEntry(bytes(24))}, found["good.ptd"])
    for name in ("pte", "ptd"):
        whole = found[f"good.{name}"].read_bytes()
        found[f"cut.{name}"].write_bytes(whole[: len(whole) - 30])
    found["empty"].touch()
    found["text"].write_text(
        "these bytes are a text, long enough for the header of a program " * 3
    )
    found["folder"].mkdir()
    found["hostile"] = _hostile(tmp_path / "hostile.pte")
    return found


_BAD = ("cut.pte", "cut.ptd", "empty", "text", "folder", "no")
_WAYS = [
    *(["inspect"], ["verify"], ["extract"], ["inspect", "--json"], ["diff", "good.pte"]),
    *(["diff", "BAD", "good.pte"], ["verify", "good.pte", "--data"]),
]
_TABLE = [
    *(
        ([name if word == "BAD" else word for word in way] + [name] * ("BAD" not in way), 3, name)
        for way in _WAYS
        for name in _BAD
    ),
    (["extract", "good.ptd"], 3, "good.ptd"),
    (["diff", "good.ptd", "good.pte"], 3, "good.ptd"),
    (["inspect", "--html", "no/page", "good.pte"], 4, "page"),
    (["diff", "--html", "no/deeper/page", "good.pte", "good.pte"], 4, "there is no folder"),
    (["extract", "good.pte", "-o", "no/deeper/parts"], 4, "there is no folder"),
    (["inspect", "--html", "folder", "good.pte"], 4, "folder"),
    (["inspect", "--html", "page", "good.ptd"], 2, "good.ptd"),
    (["diff", "--html", "no/page", "good.pte", "good.pte"], 4, "page"),
    (["extract", "good.pte", "-o", "folder"], 2, "folder"),
    (["extract", "good.pte", "-o", "text/parts"], 4, "parts"),
]


@pytest.mark.parametrize(("arguments", "status", "named"), _TABLE, ids=str)
def test_bad_input_gets_one_line_that_names_it(
    arguments: list[str],
    status: int,
    named: str,
    files: dict[str, Path],
    shell: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = files["no"].parent
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    shown = shell(*arguments, status=status).err
    assert shown.startswith(f"lowerdeck {arguments[0]}: ")
    assert shown.count("\n") == 1
    assert named in shown
    assert sorted(folder.rglob("*")) == before


_HTML = ["inspect", "model.pte", "--html", "OUT"]
_NAMES = ("model.pte", "./model.pte", "folder/../model.pte", "hard.pte", "soft.pte", "chain.pte")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *((_HTML, name) for name in _NAMES),
        (["inspect", "OUT", "--html", "model.pte"], "hard.pte"),
        (["diff", "model.pte", "good.pte", "--html", "OUT"], "soft.pte"),
        (["diff", "good.pte", "model.pte", "--html", "OUT"], "chain.pte"),
        (["extract", "model.pte", "--output", "OUT"], "./model.pte"),
    ],
    ids=str,
)
def test_an_output_that_is_an_input_is_refused_under_every_name(
    arguments: list[str],
    name: str,
    files: dict[str, Path],
    shell: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = files["no"].parent
    monkeypatch.chdir(folder)
    model = Path("model.pte")
    model.write_bytes(files["good.pte"].read_bytes())
    Path("hard.pte").hardlink_to(model)
    Path("soft.pte").symlink_to(model)
    Path("chain.pte").symlink_to(folder / "soft.pte")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shown = shell(*(name if word == "OUT" else word for word in arguments), status=2)
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    path = Path(name if arguments[-1] == "OUT" else "model.pte")
    assert f"{arguments[-2]} {path} is the file that " in shown.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_outputs_to_one_path_are_refused_but_for_devices(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "not_there_yet")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for one, other in (("a", "./a"), ("not_there_yet", "link"), ("loop", "loop")):
        paths = [("--one", f"{tmp_path}/{one}"), ("--other", f"{tmp_path}/{other}")]
        with pytest.raises(CommandError, match=r"--other .* is the file that --one .* names") as e:
            check_paths(read=[], written=paths)
        assert e.value.exit_status == ExitStatus.USAGE
    check_paths(read=[("FILE", os.devnull)], written=[("--a", os.devnull), ("--b", os.devnull)])
    check_paths(read=[("FILE", None)], written=[("--a", None), ("--b", tmp_path / "b")])


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_and_wrong_arguments(command: str, shell: Any) -> None:
    installed = f"lowerdeck-serializer {version('lowerdeck-serializer')}"
    for arguments, status, text in (
        (["--help"], 0, "130 interrupted"),
        ([], 2, ""),
        (["--nonsense"], 2, ""),
        (["a", "b", "c", "--html"], 2, ""),
    ):
        shown = shell(command, *arguments, status=status).out
        assert text in " ".join(shown.split())
    assert f"{installed}\n" in shell("--version").out


@pytest.mark.parametrize("text", [_EVIL, "a" * 5000 + _EVIL])
@pytest.mark.parametrize("words", [["ops", "a"], ["extract", "a"], []])
def test_wrong_arguments_are_told_short_and_harmlessly(
    words: list[str], text: str, shell: Any
) -> None:
    for word in (f"--{text}", text):
        shown = shell(*words, word, status=2)
        assert shown.out == ""
        assert len(shown.err) < 3000
        assert "error: " in shown.err or not words
        assert all(line.isprintable() for line in shown.err.split("\n"))


class _PlannedError(Exception):
    exit_status = 4


class _Failing:
    help = "fails"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Take no arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Fail."""
        raise self._error


class Offered(EntryPoint):
    """An entry point of a command that is there already."""

    def load(self) -> Any:
        return vars(self)["command"]


def offer(monkeypatch: pytest.MonkeyPatch, command: _Failing) -> None:
    entry = Offered("fail", "module:fail", command_line.GROUP)
    vars(entry)["command"] = command
    monkeypatch.setattr(command_line, "installed_entries", lambda group: [entry])


_FAULT = "a bug in lowerdeck"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (_Failing(_PlannedError("no kernel aten::a")), 4, "no kernel aten::a"),
        (_Failing(CommandError("bad")), 3, "bad"),
        (
            _Failing(CommandError("asked wrongly", ExitStatus.USAGE)),
            2,
            "asked wrongly",
        ),
        (_Failing(OSError(28, "No space left on device", "out")), 4, "No space left"),
        (_Failing(MemoryError()), 4, "MemoryError"),
        (_Failing(KeyError("x")), 4, f"{_FAULT}.*KeyError: 'x'.*--debug"),
        (_Failing(RecursionError("deep")), 4, _FAULT),
        (_Failing(KeyboardInterrupt()), 130, "interrupted"),
    ],
)
def test_an_error_of_any_package_becomes_a_status(
    command: _Failing, status: int, message: str, monkeypatch: pytest.MonkeyPatch, shell: Any
) -> None:
    before = signal.getsignal(signal.SIGINT)
    offer(monkeypatch, command)
    shown = shell("fail", status=status).err
    assert re.fullmatch(f"lowerdeck fail: .*{message}.*\n", shown)
    traced = shell("fail", "--debug", status=status).err
    assert traced.startswith("Traceback (most recent call last):\n")
    assert traced.endswith(shown)
    assert signal.getsignal(signal.SIGINT) is before


# Interrupts the script when it begins to import a module, and lets the module be what it becomes.
INTERRUPTING = """
import os, signal, sys
at, sys.argv = sys.argv[1], ["lowerdeck", *sys.argv[2:]]
class Finder:
    def find_spec(self, name, *_):
        if name == at:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("cannot load module more than once per process") from None
sys.meta_path.insert(0, Finder())
from lowerdeck.script import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("lowerdeck.serializer", ["inspect", "good.pte"]),
        ("argparse", ["verify", "good.pte"]),
        ("lowerdeck.inspect.command_line", []),
    ],
)
def test_an_interrupt_while_the_script_imports_ends_it_without_a_word(
    at: str, words: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTING, at, *words],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert done.stdout == ""


_SCRIPT = "import sys; from lowerdeck.script import main; sys.exit(main())"


_ENCODINGS = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    **{name: {"PYTHONIOENCODING": name} for name in ("ascii:strict", "ascii:xmlcharrefreplace")},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
}


@pytest.mark.parametrize("name", _ENCODINGS)
def test_every_command_prints_in_any_encoding_and_hostile_names_reach_no_terminal(
    name: str, files: dict[str, Path]
) -> None:
    folder = files["no"].parent
    program = add_program()
    found = "na\u00efve \U0001f600.pte"
    program.execution_plan[0].name = "na\u00efve \U0001f600"
    pte.write_pte(program, folder / found)
    commands = {
        **dict.fromkeys(["inspect NAME", "inspect --json NAME", "inspect --html page NAME"], 0),
        **dict.fromkeys(["verify NAME", "ops NAME", "extract NAME", "--version", ""], 0),
        **dict.fromkeys(["diff NAME good.pte", "diff hostile.pte good.pte"], 1),
        **dict.fromkeys(["verify good.pte --data NAME", "inspect noNAME"], 3),
        "inspect hostile.pte": 0,
    }
    code = (
        "import json, sys; from lowerdeck.script import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    print('status', main([w.replace('NAME', sys.argv[2]) for w in line.split()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(list(commands)), found],
        capture_output=True,
        check=False,
        cwd=folder,
        env={**os.environ, **_ENCODINGS[name]},
    )
    assert done.returncode == 0, done.stderr
    text, told = (one.decode("cp1252") for one in (done.stdout, done.stderr))
    status = [int(one) for one in re.findall(r"^status (\d+)$", text, re.MULTILINE)]
    assert status == list(commands.values()), told
    assert (text + told).isascii() == (name != "cp1252")
    assert all(line == pte.printable(line) for line in (text + told).split("\n"))
    assert r"\U0001f600" in text
    assert r"m\x1b[2J" in text
    assert len(told.splitlines()) == 2


def test_a_reader_that_goes_away_is_no_error(files: dict[str, Path]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, "inspect", "--json", str(files["hostile"])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("words", [["inspect", "good.pte"], ["--version"], ["inspect", "--help"]])
def test_a_full_disk_under_the_output_is_status_4_and_names_it(
    words: list[str], files: dict[str, Path]
) -> None:
    words = [str(files.get(word, word)) for word in words]
    with Path("/dev/full").open("wb") as full:
        code = [sys.executable, "-c", _SCRIPT, *words]
        done = subprocess.run(code, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 4
    line = f"lowerdeck {words[0]}: cannot write stdout: No space left on device\n"
    assert done.stderr == line.encode()


@pytest.mark.parametrize(
    ("line", "closed", "status", "told"),
    [
        ("verify good.pte", ">&-", 4, "lowerdeck verify: stdout is closed\n"),
        ("--version", ">&- 2>&-", 4, ""),
        ("inspect --help", ">&-", 4, "lowerdeck inspect: stdout is closed\n"),
        ("verify -q good.pte", ">&-", 0, ""),
        ("inspect cut.pte", ">&- 2>&-", 3, ""),
        ("no_such_command", ">&- 2>&-", 2, ""),
        ("verify good.pte", "2>&-", 0, ""),
    ],
)
def test_closed_streams_are_told_where_they_can_be(
    line: str, closed: str, status: int, told: str, files: dict[str, Path]
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", _SCRIPT, *line.split()],
        capture_output=True,
        check=False,
        cwd=files["no"].parent,
        text=True,
    )
    assert (done.returncode, done.stderr) == (status, told)
    assert bool(done.stdout) == (closed == "2>&-")


def test_a_command_that_cannot_be_loaded_is_told_with_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, shell: Any, tmp_path: Path
) -> None:
    (tmp_path / "leaving_command.py").write_text("import sys; sys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = EntryPoint("leave", "leaving_command:leave", command_line.GROUP)
    monkeypatch.setattr(command_line, "installed_entries", lambda group: [entry])
    told = "this command (leaving_command:leave) cannot be loaded: SystemExit: 0"
    assert told in shell("leave", status=4).err
    root_parser = command_line.root_parser()
    assert root_parser.parse_args([]) is not None


@pytest.mark.parametrize("mask", [0o002, 0o077])
def test_extract_makes_folders_as_umask_says_and_writes_equal_data_once(
    mask: int, files: dict[str, Path], shell: Any
) -> None:
    target = files["no"].parent / "parts"
    program = pte.deserialize_pte(files["hostile"].read_bytes())
    program.named_data += [pte.NamedData(f"k{number}", b"shared") for number in range(50)]
    pte.write_pte(program, files["hostile"])
    before = os.umask(mask)
    try:
        shell("extract", files["hostile"], "-o", target)
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~mask
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", path.name) for path in target.rglob("*"))
    assert len(list((target / "named_data").iterdir())) == 2


@given(st.text(st.characters(codec=None)))
def test_printable_text_is_printable_and_stays_so(text: str) -> None:
    shown = pte.printable(text)
    assert pte.printable(shown) == shown
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert all(letter.isprintable() or letter.isspace() for letter in shown)


@pytest.mark.parametrize(
    "letter",
    [
        *map(chr, [*range(32), *range(127, 160)]),
        *"\u061c\u200b\u200e\u200f\u202a\u202e",
        *"\u2066\u2069\u2028\u2029\ufeff\ud800\udfff\ue000\U000e0001\U0010ffff",
    ],
    ids=ascii,
)
def test_what_hides_or_steers_is_escaped(letter: str) -> None:
    number = ord(letter)
    form = "\\x{:02x}" if number < 256 else "\\u{:04x}" if number < 65536 else "\\U{:08x}"
    assert pte.printable(f"a{letter}b") == f"a{form.format(number)}b"


def test_every_argument_of_every_installed_command_has_a_help_text() -> None:
    """Of all commands, also those of other packages where they are installed."""

    def silent(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, nested in action.choices.items():
                    yield from (f"{name} {found}" for found in silent(nested))
            elif not action.help:
                yield action.dest

    assert list(silent(command_line.root_parser())) == []
