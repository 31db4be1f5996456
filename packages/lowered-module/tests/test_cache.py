"""Nothing that lies in a cache is trusted, and no cache can make a lowering fail."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import uuid
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    BackendDetails,
    CacheError,
    CompileSpec,
    LoweredBackendModule,
    PreprocessResult,
    to_backend,
)
from lowerdeck.lowered_module.preprocess.cache import MAGIC, ResultCache
from lowerdeck.lowered_module.preprocess.content_key import content_key
from lowerdeck.lowered_module.testing import TaggingPartitioner, VerbatimBackend
from lowerdeck.serializer import NamedDataStore

KEY = "0" * 64
fsspec = pytest.importorskip("fsspec")


class FirstCaching(BackendDetails):
    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"compiled")


class SecondCaching(FirstCaching):
    pass


def entry(head: object, parts: bytes = b"", *, key: str = KEY) -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    content = len(text).to_bytes(8, "little") + text + parts
    return MAGIC + hashlib.sha256(content).digest() + content


def kept(folder: Path) -> ResultCache:
    cache = ResultCache(folder)
    store = NamedDataStore()
    store.add_named_data("weight", b"12345678", alignment=16)
    result = PreprocessResult(b"blob", {1: (2, 3)}, store.get_named_data_store_output())
    cache.put(KEY, result)
    assert cache.get(KEY) == result
    return cache


def test_an_entry_that_others_may_write_counts_as_absent(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    path = tmp_path / f"{KEY}.result"
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert cache.get(KEY) is None
    path.chmod(0o644)
    assert cache.get(KEY) is not None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners are POSIX's")
def test_an_entry_of_somebody_else_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = kept(tmp_path)
    status = (tmp_path / f"{KEY}.result").stat()
    other = os.stat_result((*status[:4], status.st_uid + 4711, *status[5:10]))
    monkeypatch.setattr(os, "fstat", lambda _: other)
    assert cache.get(KEY) is None


def test_an_entry_under_another_name_counts_as_absent(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    (tmp_path / f"{KEY}.result").rename(tmp_path / f"{'1' * 64}.result")
    assert cache.get("1" * 64) is None


def test_what_is_no_plain_file_counts_as_absent(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    path = tmp_path / f"{KEY}.result"
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert cache.get(KEY) is None
    path.unlink()
    os.mkfifo(path)
    assert cache.get(KEY) is None
    path.unlink()
    path.mkdir()
    assert cache.get(KEY) is None


def heads() -> list[Any]:
    good = {
        "key": KEY,
        "handles": [[1, [2]]],
        "sizes": [4, 8],
        "pte": {"w": [0, 16, None]},
        "external": {},
    }
    wrong: list[Any] = [[], 3, None, "x", {}, b"not json", b"\xff", b"[" * 100_000, b"{" * 100_000]
    changes: list[tuple[str, Any]] = [
        ("key", "1" * 64),
        ("handles", 7),
        ("handles", [7]),
        ("handles", [[[], []]]),
        ("sizes", []),
        ("sizes", None),
        ("sizes", [4]),
        ("sizes", [-4, 16]),
        ("sizes", [4.5, 7.5]),
        ("sizes", [1 << 70, 8]),
        ("sizes", ["4", "8"]),
        ("pte", {"w": [1, 16, None]}),
        ("pte", {"w": [-1, 16, None]}),
        ("pte", {"w": ["0", 16, None]}),
        ("pte", {"w": [0, "16", None]}),
        ("pte", {"w": [0, 16, [99, [1], [0]]]}),
        ("pte", {"w": [0, 16, [6, "x", [0]]]}),
        ("pte", {"w": [0, 16]}),
        ("pte", [1]),
        ("external", []),
        ("external", {"t": 1}),
        ("external", {"t": {"w": [9, 16, None]}}),
    ]
    return wrong + [good | {name: value} for name, value in changes]


@pytest.mark.parametrize("head", heads(), ids=lambda head: repr(head)[:40])
def test_a_forged_entry_counts_as_absent(head: Any, tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.result"
    path.write_bytes(entry(head, b"blob12345678"))
    path.chmod(0o600)
    assert ResultCache(tmp_path).get(KEY) is None


@pytest.mark.parametrize("content", [b"", MAGIC, MAGIC + bytes(31), MAGIC + bytes(32)])
def test_a_file_cut_short_counts_as_absent(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"{KEY}.result"
    path.write_bytes(content)
    path.chmod(0o600)
    assert ResultCache(tmp_path).get(KEY) is None


def test_a_full_cache_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    monkeypatch.setattr(Path, "replace", full)
    partitioner = TaggingPartitioner(lambda _: "t", backend_id="FirstCaching")
    with pytest.warns(UserWarning, match=r"was not kept in the cache.*No space left"):
        to_backend(program, partitioner, cache=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing half-written stays"


_FULL = """
import resource, sys, warnings
from lowerdeck.lowered_module import PreprocessResult
from lowerdeck.lowered_module.preprocess.cache import ResultCache
cache = ResultCache(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    cache.put("0" * 64, PreprocessResult(bytes(100_000)))
print([str(one.message) for one in said], cache.get("0" * 64))
"""


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="limits are POSIX's")
def test_what_the_system_stops_half_way_leaves_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", _FULL, str(tmp_path)]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "was not kept in the cache" in told
    assert "File too large" in told
    assert told.rstrip().endswith("None")
    assert not list(tmp_path.iterdir())


def _write_often(folder: str, letter: str) -> int:
    cache = ResultCache(folder)
    wrong = 0
    for _ in range(200):
        cache.put(KEY, PreprocessResult(letter.encode() * 50_000))
        found = cache.get(KEY)
        wrong += found is None or found.processed_bytes not in (b"a" * 50_000, b"b" * 50_000)
    return wrong


@pytest.mark.parametrize("remote", [False, True])
def test_two_processes_that_write_the_same_entry_read_whole_ones(
    remote: bool, tmp_path: Path
) -> None:
    # Forked children know this module; spawned ones could not import it by its name.
    context = multiprocessing.get_context("fork")
    place = f"local://{tmp_path}" if remote else str(tmp_path)
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        wrong = list(executor.map(_write_often, [place] * 2, "ab"))
    assert wrong == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.result"]


def test_a_cache_may_be_behind_a_url() -> None:
    place = f"memory://{uuid.uuid4()}/cache"
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    partitioner = TaggingPartitioner(lambda _: "t")
    wanted = to_backend(program, partitioner).graph_module.lowered_module_0.processed_bytes
    for _ in range(2):
        found = to_backend(program, partitioner, cache=place)
        assert found.graph_module.lowered_module_0.processed_bytes == wanted
    files = fsspec.core.url_to_fs(place)[0].glob(f"{place}/*")
    assert [file.rpartition(".")[2] for file in files] == ["result"]
    cache = ResultCache(place)
    key = files[0].rpartition("/")[2].partition(".")[0]
    assert cache.get(key) is not None
    assert cache.get("1" * 64) is None


def test_a_url_that_fails_is_a_miss_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ResultCache(f"memory://{uuid.uuid4()}/cache")

    def broken(*_: object) -> None:
        raise RuntimeError("no connection")

    for name in ("cat_file", "pipe_file"):
        monkeypatch.setattr(f"fsspec.implementations.memory.MemoryFileSystem.{name}", broken)
    with pytest.warns(UserWarning, match=r"was not kept in the cache.*no connection"):
        cache.put(KEY, PreprocessResult(b"x"))
    assert cache.get(KEY) is None


def test_an_unknown_url_is_one_clear_error() -> None:
    with pytest.raises(CacheError, match=r"no directory for a cache .* 'nobody://knows/this'"):
        ResultCache("nobody://knows/this")


def test_a_directory_that_cannot_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match=r"no directory for a cache can be made at .*file"):
        ResultCache(tmp_path / "file" / "cache")


def test_a_new_directory_is_the_users_own(tmp_path: Path) -> None:
    ResultCache(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def delegated(
    backend_id: str, specs: list[CompileSpec], named: bytes | None = None
) -> ExportedProgram:
    """Return a program that calls a delegate whose bytes are always the same."""
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    lowered = to_backend(
        program,
        TaggingPartitioner(lambda _: "t", backend_id=backend_id, compile_specs=tuple(specs)),
    )
    if named is not None:
        store = NamedDataStore()
        store.add_named_data("weight", named)
        delegate = lowered.graph_module.lowered_module_0
        assert isinstance(delegate, LoweredBackendModule)
        delegate._named_data_store_output = store.get_named_data_store_output()
    return lowered


def test_programs_that_call_other_delegates_have_other_keys() -> None:
    programs = [
        delegated("FirstCaching", []),
        delegated("SecondCaching", []),
        delegated("FirstCaching", [CompileSpec("a", b"1")]),
        delegated("FirstCaching", [CompileSpec("a", b"2")]),
        delegated("FirstCaching", [CompileSpec("a", b"1"), CompileSpec("b", b"1")]),
        delegated("FirstCaching", [], b"one"),
        delegated("FirstCaching", [], b"two"),
    ]
    keys = [content_key(one, VerbatimBackend, "VerbatimBackend", []) for one in programs]
    assert None not in keys
    assert len(set(keys)) == len(programs)
    again = content_key(delegated("FirstCaching", []), VerbatimBackend, "VerbatimBackend", [])
    assert again == keys[0]
