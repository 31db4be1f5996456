"""Cache of compiled partitions, by content: a directory, or a URL that ``fsspec`` knows."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import operator
import os
import stat
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from lowerdeck.lowered_module.authoring.backend import PreprocessResult
from lowerdeck.lowered_module.authoring.rejects import operator_name
from lowerdeck.lowered_module.errors import CacheError
from lowerdeck.lowered_module.program.tags import AHEAD
from lowerdeck.serializer import DataEntry, NamedDataStoreOutput, ScalarType, TensorLayout
from lowerdeck.torch_base import attribute_of, bytes_of, graphs_of, pytree

FORMAT = "lowerdeck result 3"

# Neither through a link nor waiting for the writer of a pipe, where the system has either.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
)
# Others may read an entry, but an entry that others may change is not trusted.
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ResultCache:
    """Keeps results of ``preprocess`` under keys of their content.

    Threads, processes and machines may share a directory. Nothing in it is trusted: an entry
    counts as absent if it is not the user's own or others may write it, if it was kept under
    another key, and if it is cut short or altered. Results are data (bytes and JSON); reading
    them runs nothing. Behind a URL no owner is known: whoever may write there chooses what
    programs will contain.

    Args:
        directory: Path of a directory, which is made for the user alone if it is not there, or a
            URL that ``fsspec`` knows, such as ``s3://bucket/folder``.

    Raises:
        CacheError: The directory cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._place = os.fspath(directory).removeprefix("file://")
        try:
            self._store = _Remote(self._place) if "://" in self._place else _Directory(self._place)
        except Exception as error:  # each file system has errors of its own
            raise CacheError(
                f"no directory for a cache can be made at {self._place!r} ({_reason(error)}): "
                "name another one, or lower without a cache"
            ) from error

    def get(self, key: str | None) -> PreprocessResult | None:
        """Return the result kept under ``key``, or None.

        Args:
            key: From ``content_key``; nothing is kept under None.
        """
        if key is None:
            return None
        try:
            return _decoded(key, self._store.read(_name(key)))
        except Exception:  # absent, unreadable, or not an entry of ours: compile again
            return None

    def put(self, key: str | None, result: Any) -> None:
        """Keep ``result`` under ``key``; where that fails (a full disk), warn and go on without.

        A result with ``delegate_info_meta`` is not kept: that may be any object.

        Args:
            key: From ``content_key``; nothing is kept under None.
            result: What the backend returned.
        """
        metas = (getattr(result, f"{prefix}delegate_info_meta", None) for prefix in ("", "_"))
        plain = isinstance(result.processed_bytes, bytes) and not any(
            meta is not None for meta in metas
        )
        if key is None or not plain:
            return
        content = _encoded(key, result)
        try:
            self._store.write(_name(key), content)
        except Exception as error:
            warnings.warn(
                f"a result of {len(content)} bytes was not kept in the cache {self._place!r}: "
                f"{_reason(error)}. Lowering goes on without it",
                UserWarning,
                stacklevel=2,
            )


def content_key(
    program: ExportedProgram, backend: Any, backend_id: str, compile_specs: Iterable[Any]
) -> str | None:
    """Return a digest of all that the result of a backend depends on, or None without one.

    It covers the graph with its names, shapes, dtypes and debug handles, the weights, the specs,
    torch's version, and the backend's class and ``version``. There is none if the program holds
    an object whose content is unknown.

    Args:
        program: The partition.
        backend: Its backend class.
        backend_id: The name that the class was found by.
        compile_specs: The compile specs of the partition.
    """
    version = str(getattr(backend, "version", ""))
    words = (torch.__version__, backend_id, backend.__module__, backend.__qualname__, version)
    digest = hashlib.sha256(repr((FORMAT, words, _specs(compile_specs))).encode())
    try:
        for part in _contents(program):
            view = memoryview(part.encode() if isinstance(part, str) else part).cast("B")
            # The length keeps ("ab", "c") and ("a", "bc") apart.
            digest.update(f"{len(view)}:".encode())
            digest.update(view)
    except _UnknownContentError:
        return None
    return digest.hexdigest()


class _UnknownContentError(Exception):
    """An object of a program has no content that can be compared."""


def _contents(program: ExportedProgram) -> Iterator[Any]:
    """Yield a program as texts and buffers."""
    signature = program.graph_signature
    yield repr((signature.input_specs, signature.output_specs))
    yield str(program.range_constraints)
    for gm in graphs_of(program.graph_module):
        for node in gm.graph.nodes:
            target = operator_name(node) if node.op == "call_function" else str(node.target)
            values = [_described(one) for one in pytree.tree_leaves(node.meta.get("val"))]
            # `custom` says, for one, which file a weight is to go to.
            meta = (node.meta.get("debug_handle"), AHEAD in node.meta, node.meta.get("custom"))
            yield repr((node.op, node.name, target, node.args, node.kwargs, values, meta))
            if node.op == "get_attr":
                yield from _content_of(attribute_of(gm, node))
    for name, value in (*program.state_dict.items(), *program.constants.items()):
        yield name
        yield from _content_of(value)


def _content_of(value: Any) -> Iterator[Any]:
    """Yield the content of an attribute or a constant."""
    if isinstance(value, GraphModule):
        return  # one of the program's graphs
    if isinstance(value, torch.Tensor):
        yield _described(value)
        yield _memory_of(value)
    elif isinstance(getattr(value, "processed_bytes", None), bytes):
        # An earlier delegate: all that a backend could see of it, not its blob alone.
        yield repr((value.backend_id, _specs(value.compile_specs)))
        yield value.processed_bytes
        store: Any = getattr(value, "named_data_store_output", None)
        groups = {} if store is None else {"": store.pte_data, **store.external_data}
        for tag, entries in groups.items():
            for key, entry in entries.items():
                yield repr((tag, key, entry.alignment, entry.tensor_layout))
                yield store.buffers[entry.buffer_index]
    else:
        raise _UnknownContentError


def _memory_of(value: torch.Tensor) -> Any:
    try:
        # Through views: a lazy copy of weights stays lazy.
        return bytes_of(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
    except (RuntimeError, TypeError):
        # Sparse and quantized tensors have no plain bytes of their own.
        saved = io.BytesIO()
        torch.save(value, saved)
        return saved.getbuffer()


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    strides = value.stride() if value.layout is torch.strided else value.layout
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"


def _specs(compile_specs: Iterable[Any]) -> list[tuple[str, bytes]]:
    return [(spec.key, bytes(spec.value)) for spec in compile_specs]


# An entry is an uncompressed zip archive, whose checksums find what is cut short or altered:
# `head`, in JSON, `blob`, and the buffers of named data, numbered from 0.


def _encoded(key: str, result: Any) -> bytes:
    store = getattr(result, "data_store_output", None)
    handles = getattr(result, "debug_handle_map", None)
    head = {
        # Without it a file renamed to another key's would be taken for that key's.
        "key": key,
        # Pairs, because JSON knows no int keys.
        "handles": None if handles is None else list(handles.items()),
        "pte": None if store is None else _entries(store.pte_data),
        "external": None
        if store is None
        else {tag: _entries(entries) for tag, entries in store.external_data.items()},
    }
    buffers = () if store is None else store.buffers
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in (
            ("head", json.dumps(head).encode()),
            ("blob", result.processed_bytes),
            *((str(number), memoryview(one).cast("B")) for number, one in enumerate(buffers)),
        ):
            # Without a date, so that equal results are equal bytes.
            archive.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()


def _decoded(key: str, content: bytes) -> PreprocessResult:
    """Return the result of an entry; raise anything if it is not one of this key."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise ValueError("compressed: it might be of any size")
        parts = {name: archive.read(name) for name in archive.namelist()}
    head, blob = json.loads(parts.pop("head")), parts.pop("blob")
    if head["key"] != key:
        raise ValueError("the entry of another key")
    store = None
    if head["pte"] is not None:
        store = NamedDataStoreOutput(
            buffers=[parts[str(number)] for number in range(len(parts))],
            pte_data=_restored(head["pte"], len(parts)),
            external_data={
                tag: _restored(entries, len(parts)) for tag, entries in head["external"].items()
            },
        )
    handles = head["handles"]
    return PreprocessResult(
        processed_bytes=blob,
        debug_handle_map=None if handles is None else {name: tuple(v) for name, v in handles},
        data_store_output=store,
    )


def _entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: astuple(entry) for key, entry in entries.items()}


def _restored(entries: Mapping[str, Any], buffers: int) -> dict[str, DataEntry]:
    if not all(0 <= operator.index(index) < buffers for index, _, _ in entries.values()):
        raise ValueError("an entry of a buffer that is not there")
    return {
        key: DataEntry(index, operator.index(alignment), layout and _layout(*layout))
        for key, (index, alignment, layout) in entries.items()
    }


def _layout(scalar_type: int, sizes: Iterable[int], order: Iterable[int]) -> TensorLayout:
    integers = ([*map(operator.index, values)] for values in (sizes, order))
    return TensorLayout(ScalarType(scalar_type), *integers)


class _Directory:
    """A directory of the system, in which only the user's own files count."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, name: str) -> bytes:
        with os.fdopen(os.open(self._path / name, _FLAGS), "rb") as file:
            return file.read() if _is_own(os.fstat(file.fileno())) else b""

    def write(self, name: str, content: bytes) -> None:
        """Let a file appear, whole, by one rename."""
        handle, draft = tempfile.mkstemp(dir=self._path, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(draft).replace(self._path / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


class _Remote:
    """A folder behind a URL, such as a bucket, where a file that is half written has no sum."""

    def __init__(self, url: str) -> None:
        # Of the extra "url"; today torch needs it as well.
        fsspec = importlib.import_module("fsspec")
        self._files: Any
        self._files, self._path = fsspec.core.url_to_fs(url)
        self._files.makedirs(self._path, exist_ok=True)

    def read(self, name: str) -> bytes:
        content: bytes = self._files.cat_file(f"{self._path}/{name}")
        return content

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._path}/{name}", content)


def _name(key: str) -> str:
    return f"{key}.result"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def _is_own(status: os.stat_result) -> bool:
    """Return whether only this user (or an administrator) can have written a file."""
    if not stat.S_ISREG(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE_BY_OTHERS
