"""Writing to paths: replaced files, devices, and the state after a crash."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck.serializer.flatbuffer import stream
from lowerdeck_files.programs import add_program, named_data

_WANTED = pte.serialize_pte(add_program())
_ENTRIES = {"w": pte.ExternalEntry(bytes(24))}
_DATA = pte.ExternalData(_ENTRIES)


def test_devices_and_pipes_are_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    pte.write_pte(add_program(), pipe)
    reader.join()
    pte.write_pte(add_program(), "/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert found == [_WANTED]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("kind", ["pte", "ptd"])
def test_a_link_stays_and_its_target_is_replaced(there: bool, kind: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "model", tmp_path / "link"
    if there:
        target.write_bytes(b"old")
    link.symlink_to("real/model")
    if kind == "pte":
        pte.write_pte(add_program(), link)
    else:
        pte.write_ptd(_ENTRIES, link)
    assert link.is_symlink()
    assert target.read_bytes() == (_WANTED if kind == "pte" else pte.serialize_ptd(_ENTRIES))
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("", IsADirectoryError, "test_a_path_that"),
        ("nowhere/model.pte", FileNotFoundError, r"/nowhere/model.pte'"),
        ("/dev/full", OSError, "/dev/full"),
    ],
)
def test_a_path_that_takes_no_file_is_an_error_that_names_it(
    name: str, error: type[OSError], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        pte.write_pte(add_program(), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "number"), [("open", errno.EACCES), ("open", errno.EROFS), ("write", errno.ENOSPC)]
)
def test_a_folder_or_disk_that_takes_nothing_leaves_nothing(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "model.pte"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        owner: Any = Path if call == "open" else stream
        patch.setattr(owner, "open" if call == "open" else "_write", refuse)
        with pytest.raises(OSError, match=r"/model.pte'") as caught:
            pte.write_pte(add_program(), path)
    assert caught.value.errno == number
    assert [each.name for each in tmp_path.iterdir()] == ["model.pte"]
    assert path.read_bytes() == b"old"


def test_a_file_may_replace_the_one_that_its_bytes_come_from(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    with path.open("wb") as file:
        file.seek(1 << 22)
        file.write(b"end")
    program = add_program()
    program.constant_buffer.append(pte.Buffer(pte.FileRange(path, 5, (1 << 22) - 2)))
    pte.write_pte(program, path)
    assert path.read_bytes().endswith(bytes(64) + b"end")


def _model(letter: str, path: Path) -> None:
    program = add_program()
    program.constant_buffer[1] = pte.Buffer(letter.encode() * 24)
    data = {
        name: pte.ExternalData({name: pte.ExternalEntry(letter.encode() * 8)})
        for name in ("one", "two")
    }
    pte.write_model(program, path, named_data=named_data(data))


def _letters(folder: Path) -> dict[str, str]:
    """Return which model each file is of."""
    return {
        path.name: "b" if b"b" * 8 in path.read_bytes() else "a"
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


_OLD, _NEW = ({"model.pte": letter, "one.ptd": letter, "two.ptd": letter} for letter in ("a", "b"))


_CALLS = ("open", "replace", "unlink", "fsync", "close")


def _at_step(number: int, stop: Callable[[], object]) -> None:
    """Let the call of this number that changes the folder stop everything."""
    calls = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                stop()
            return call(*args, **options)

        return run

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))


def test_a_killed_writer_never_leaves_a_program_with_the_data_of_another(tmp_path: Path) -> None:
    states = []
    for step in range(1, 200):
        folder = tmp_path / str(step)
        folder.mkdir()
        _model("a", folder / "model.pte")
        child = os.fork()
        if not child:
            try:
                _at_step(step, lambda: os._exit(9))
                _model("b", folder / "model.pte")
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        found = _letters(folder)
        assert found in (_OLD, _NEW) or "model.pte" not in found, f"step {step}: {found}"
        states.append(found)
        if not status:
            break
    assert states[0] == _OLD
    assert states[-1] == _NEW
    assert len(states) > 6


@pytest.mark.parametrize("tag", ["", "../up", "a/b", "/a"])
def test_a_tag_that_names_no_file_is_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(pte.ProgramError, match="expected the stem of a file name"):
        pte.write_model(add_program(), tmp_path / "model.pte", named_data=named_data({tag: _DATA}))
    assert not list(tmp_path.iterdir())
