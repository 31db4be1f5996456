"""Cache of compiled partitions, by content: a directory, or a URL that ``fsspec`` knows."""

from __future__ import annotations

import hashlib
import importlib
import json
import operator
import os
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from lowerdeck.lowered_module.authoring.backend import PreprocessResult
from lowerdeck.lowered_module.authoring.rejects import operator_name
from lowerdeck.lowered_module.errors import CacheError
from lowerdeck.lowered_module.program.tags import AHEAD, DECISION
from lowerdeck.serializer import DataEntry, NamedDataStoreOutput, ScalarType, TensorLayout
from lowerdeck.torch_base import attribute_of, bytes_of, graphs_of, pytree

FORMAT = "lowerdeck result 4"

# Do not follow symbolic links, nor block on a named pipe.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
)
# Entries that other users can write are not trusted.
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ResultCache:
    """Cache of results of ``preprocess`` by content.

    Threads, processes and machines may share a directory. An entry is ignored if another user
    (except root) owns it or can write it, if it was stored under another key, or if it is
    truncated or altered. Entries are bytes and JSON; reading them runs no code. Files at a URL
    have no owner: anyone who can write to the URL can change delegates.

    Args:
        directory: Path of a directory, or an ``fsspec`` URL, such as ``s3://bucket/folder``. A
            missing directory is created, with access for the user only.

    Raises:
        CacheError: The directory cannot be created.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._place = os.fspath(directory).removeprefix("file://")
        try:
            self._store = _Remote(self._place) if "://" in self._place else _Directory(self._place)
        except Exception as error:  # each file system has other errors
            raise CacheError(
                f"the cache directory cannot be created at {self._place!r} ({_reason(error)}): "
                "name another one, or lower without a cache"
            ) from error

    def get(self, key: str | None) -> PreprocessResult | None:
        """Return the result stored under ``key``, or None."""
        if key is None:
            return None
        try:
            return _decoded(key, self._store.read(_name(key)))
        except Exception:  # missing, unreadable or invalid: compile again
            return None

    def put(self, key: str | None, result: Any) -> None:
        """Store ``result`` under ``key``; warn if that fails, such as on a full disk.

        Results with ``delegate_info_meta``, which may be any object, are not stored.
        """
        metas = (getattr(result, f"{prefix}delegate_info_meta", None) for prefix in ("", "_"))
        has_objects = any(meta is not None for meta in metas)
        if key is None or has_objects or not isinstance(result.processed_bytes, bytes):
            return
        content = _encoded(key, result)
        try:
            self._store.write(_name(key), content)
        except Exception as error:
            warnings.warn(
                f"a result of {len(content)} bytes was not stored in the cache {self._place!r}: "
                f"{_reason(error)}. Lowering continues",
                UserWarning,
                stacklevel=2,
            )


def content_key(
    program: ExportedProgram, backend: Any, backend_id: str, compile_specs: Iterable[Any]
) -> str | None:
    """Return a digest of a partition and its backend, or None.

    It covers the graph with names, shapes, dtypes and debug handles, the weights, the specs,
    torch's version, and the backend's class and ``version``. It is None if the program contains an
    object whose content is unknown.
    """
    version = str(getattr(backend, "version", ""))
    words = (torch.__version__, backend_id, backend.__module__, backend.__qualname__, version)
    specs = [(spec.key, bytes(spec.value)) for spec in compile_specs]
    digest = hashlib.sha256(repr((FORMAT, words, specs)).encode())
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
    """An object of a program has no comparable content."""


def _contents(program: ExportedProgram) -> Iterator[Any]:
    """Yield the content of a program as strings and buffers."""
    signature = program.graph_signature
    yield repr((signature.input_specs, signature.output_specs))
    yield str(program.range_constraints)
    for gm in graphs_of(program.graph_module):
        for node in gm.graph.nodes:
            target = operator_name(node) if node.op == "call_function" else str(node.target)
            values = [_described(leaf) for leaf in pytree.tree_leaves(node.meta.get("val"))]
            # `custom` may name the file of a weight, for example.
            meta = (
                *(node.meta.get("debug_handle"), AHEAD in node.meta),
                *(node.meta.get("custom"), node.meta.get(DECISION)),
            )
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
    if not isinstance(value, torch.Tensor):
        raise _UnknownContentError  # for example, an earlier delegate
    yield _described(value)
    try:
        # Through views, so that copy-on-write weights stay uncopied.
        yield bytes_of(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
    except (RuntimeError, TypeError):
        # Sparse and quantized tensors have no plain bytes.
        raise _UnknownContentError from None


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    strides = value.stride() if value.layout is torch.strided else value.layout
    return f"{value.dtype} {tuple(value.shape)} {strides} {value.device}"


# An entry is the SHA-256 of the rest, a line of JSON, and the bytes described there: the blob and
# the buffers of named data. The JSON contains the key, so that a renamed file is detected.


def _encoded(key: str, result: Any) -> bytes:
    store = getattr(result, "data_store_output", None)
    handles = getattr(result, "debug_handle_map", None)
    blobs = [result.processed_bytes, *(() if store is None else store.buffers)]
    views = [memoryview(blob).cast("B") for blob in blobs]
    # Pairs, because JSON has no int keys; tag None is for named data of the program itself.
    pairs = None if handles is None else list(handles.items())
    groups = [] if store is None else [(None, store.pte_data), *store.external_data.items()]
    entries = [(tag, key, astuple(data)) for tag, group in groups for key, data in group.items()]
    tags = None if store is None else list(store.external_data)
    head = json.dumps([key, [view.nbytes for view in views], pairs, tags, entries])
    content = b"".join([head.encode(), b"\n", *views])
    return hashlib.sha256(content).digest() + content


def _decoded(key: str, entry: bytes) -> PreprocessResult:
    """Return the result of an entry; raise any exception if it is not an entry of this key."""
    start = hashlib.sha256().digest_size
    end = entry.index(b"\n", start) + 1
    if hashlib.sha256(memoryview(entry)[start:]).digest() != entry[:start]:
        raise ValueError("truncated or altered")
    version, sizes, pairs, tags, entries = json.loads(entry[start:end])
    if version != key:
        raise ValueError("stored under another key")
    buffers: list[Any] = [entry[a:b] for a, b in pairwise(accumulate(sizes, initial=end))]
    blob, store = buffers.pop(0), None
    if tags is not None:
        store = NamedDataStoreOutput(buffers, {}, {tag: {} for tag in tags})
        for tag, name, (index, alignment, layout) in entries:
            if not 0 <= operator.index(index) < len(buffers):
                raise ValueError("refers to a missing buffer")
            group = store.pte_data if tag is None else store.external_data[tag]
            group[name] = DataEntry(index, operator.index(alignment), layout and _layout(*layout))
    handles = None if pairs is None else {name: tuple(value) for name, value in pairs}
    return PreprocessResult(blob, handles, store)


def _layout(scalar_type: int, sizes: Iterable[int], order: Iterable[int]) -> TensorLayout:
    integers = ([*map(operator.index, values)] for values in (sizes, order))
    return TensorLayout(ScalarType(scalar_type), *integers)


class _Directory:
    """A local directory; files of other users are ignored."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, name: str) -> bytes:
        with os.fdopen(os.open(self._path / name, _FLAGS), "rb") as file:
            return file.read() if _is_own(os.fstat(file.fileno())) else b""

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically, by a rename."""
        handle, draft = tempfile.mkstemp(dir=self._path, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(draft).replace(self._path / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise


class _Remote:
    """A folder at a URL, such as a bucket; a partly written file has a wrong checksum."""

    def __init__(self, url: str) -> None:
        # From the extra "url"; torch requires it as well.
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
