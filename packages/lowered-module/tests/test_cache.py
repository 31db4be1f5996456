"""Nothing in a cache is trusted, and no cache can make a lowering fail."""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_helpers import backend, blobs, everything
from torch.export import ExportedProgram

from lowerdeck.lowered_module import CacheError, PreprocessResult, to_backend
from lowerdeck.serializer import NamedDataStore
from lowerdeck_zoo import exported

fsspec = pytest.importorskip("fsspec")
CALLS: list[str] = []


def compiled(program: ExportedProgram, specs: Any) -> PreprocessResult:
    CALLS.append(str(program.graph))
    store = NamedDataStore()
    store.add_named_data("weight", b"12345678", alignment=16)
    return PreprocessResult(b"blob", {1: (2, 3)}, store.get_named_data_store_output())


@pytest.fixture(autouse=True)
def caching() -> Iterator[None]:
    with backend(compiled, "First"), backend(compiled, "Second"):
        yield


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return exported(torch.nn.ReLU(), torch.ones(2))


def compiles(program: ExportedProgram, cache: Path | str) -> bool:
    """Lower with a cache; return whether the backend had to compile."""
    wanted = blobs(to_backend(program, everything("First")))
    CALLS.clear()
    assert blobs(to_backend(program, everything("First"), cache=cache)) == wanted
    return bool(CALLS)


@pytest.fixture
def entry(program: ExportedProgram, tmp_path: Path) -> Path:
    """A result in a cache, which is the folder of that file."""
    assert compiles(program, tmp_path / "cache")
    assert not compiles(program, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    return path


def _to_link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def _to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _forged(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the JSON of an entry, whose checksum is right again."""

    def forge(path: Path) -> None:
        line, _, blobs = path.read_bytes()[32:].partition(b"\n")
        head = change(json.loads(line))
        content = (head if isinstance(head, bytes) else json.dumps(head).encode()) + b"\n" + blobs
        path.write_bytes(hashlib.sha256(content).digest() + content)

    return forge


def _cut(length: int) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[:length])


def _with_mode(mode: int) -> Callable[[Path], Any]:
    return lambda path: path.chmod(mode)


def _is(head: Any) -> Callable[[Path], Any]:
    return _forged(lambda _: head)


_HEAD = ("key", "sizes", "handles", "tags", "entries")


def _has(key: str, value: Any) -> Callable[[Path], Any]:
    return _forged(
        lambda head: list((dict(zip(_HEAD, head, strict=True)) | {key: value}).values())
    )


_ODD_HEADS: list[Any] = [
    [],
    3,
    None,
    "x",
    {},
    b"not json",
    b"\xff",
    b"[" * 100_000,
    b"{" * 100_000,
]
_ODD_VALUES: dict[str, list[Any]] = {
    "key": ["1" * 64],
    "handles": [7, [7], [[[], []]]],
    "sizes": [[], 4, [4, "8"]],
    "tags": [3, [[]], [{}]],
    "entries": [
        *([1], [[None, "w"]], [["t", "w", [0, 16, None]]]),
        *(
            [[None, "w", value]]
            for value in (
                *([0, 16], [1, 16, None], [-1, 16, None], [9, 16, None]),
                *(["0", 16, None], [0, "16", None]),
                *([0, 16, [99, [1], [0]]], [0, 16, [6, "x", [0]]]),
            )
        ),
    ],
}
CHANGES: dict[str, Callable[[Path], Any]] = {
    **{f"{mode:o}": _with_mode(mode) for mode in (0o620, 0o602, 0o666)},
    "link": _to_link,
    "pipe": _to_pipe,
    "folder": _to_folder,
    **{f"cut {length}": _cut(length) for length in (-1, 0, 7, 31, 32, 38)},
    "altered blob": lambda p: p.write_bytes(p.read_bytes().replace(b"blob", b"bulb", 2)),
    "altered weight": lambda p: p.write_bytes(p.read_bytes().replace(b"12345678", b"12345679")),
    "unchanged JSON is found": _forged(lambda head: head),
    **{f"is {str(head)[:9]}": _is(head) for head in _ODD_HEADS},
    **{f"{k} {value}": _has(k, value) for k, some in _ODD_VALUES.items() for value in some},
}


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_a_whole_entry_of_the_user_counts_as_absent(
    change: str, entry: Path, program: ExportedProgram
) -> None:
    CHANGES[change](entry)
    if change == "folder":
        with pytest.warns(UserWarning, match="was not stored in the cache"):
            assert compiles(program, entry.parent)
        return
    assert compiles(program, entry.parent) == (change != "unchanged JSON is found")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners are POSIX's")
def test_an_entry_of_another_user_counts_as_absent(
    entry: Path, program: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = entry.stat()
    other = os.stat_result((*status[:4], status.st_uid + 4711, *status[5:10]))
    monkeypatch.setattr(os, "fstat", lambda _: other)
    assert compiles(program, entry.parent)


def test_results_with_objects_are_not_kept(program: ExportedProgram, tmp_path: Path) -> None:
    with backend(lambda *_: PreprocessResult(b"x", delegate_info_meta=object())):
        to_backend(program, everything("Custom"), cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_cache_only_warns(
    program: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match=r"was not stored in the cache.*No space left"):
        assert compiles(program, tmp_path)
    assert not list(tmp_path.iterdir()), "nothing half-written stays"


@pytest.mark.skipif(sys.platform == "win32", reason="limits are POSIX's")
def test_what_the_system_stops_half_way_leaves_nothing(
    program: ExportedProgram, tmp_path: Path
) -> None:
    resource = importlib.import_module("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"was not stored in the cache.*File too large"):
            assert compiles(program, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def _lower_often(place: str) -> int:
    program = exported(torch.nn.ReLU(), torch.ones(2))
    # Every second time each process compiles and writes, because the other one removes the entry.
    wrong = 0
    for _ in range(20):
        (found,) = blobs(to_backend(program, everything("First"), cache=place))
        wrong += found[0] != b"blob"
        for path in Path(place.removeprefix("local://")).glob("*.result"):
            path.unlink(missing_ok=True)
    return wrong


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_two_processes_that_write_the_same_entry_read_whole_ones(
    scheme: str, tmp_path: Path
) -> None:
    # Forked children know this module; spawned ones could not import it by its name.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        assert list(executor.map(_lower_often, [f"{scheme}{tmp_path}"] * 2)) == [0, 0]
    assert {path.suffix for path in tmp_path.iterdir()} <= {".result"}


def test_a_cache_may_be_behind_a_url_which_may_fail(
    program: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"memory://{uuid.uuid4()}/cache"
    assert [compiles(program, place) for _ in range(2)] == [True, False]
    files = fsspec.core.url_to_fs(place)[0].glob(f"{place}/*")
    assert [file.rpartition(".")[2] for file in files] == ["result"]

    def broken(*_: object) -> None:
        raise RuntimeError("no connection")

    for name in ("cat_file", "pipe_file"):
        monkeypatch.setattr(f"fsspec.implementations.memory.MemoryFileSystem.{name}", broken)
    with pytest.warns(UserWarning, match=r"was not stored in the cache.*no connection"):
        assert compiles(program, place)


def test_a_directory_that_cannot_be_is_one_clear_error(
    program: ExportedProgram, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in ("nobody://knows/this", tmp_path / "file" / "cache"):
        with pytest.raises(CacheError, match=rf"the cache directory cannot be created .*{place}"):
            compiles(program, place)
    compiles(program, tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_programs_that_call_other_delegates_are_not_kept(
    program: ExportedProgram, tmp_path: Path
) -> None:
    to_backend(to_backend(program, everything("First")), everything(), cache=tmp_path)
    assert not list(tmp_path.iterdir())
