"""A directory of what backends returned, by content."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import warnings
from collections.abc import Mapping
from typing import Any

from lowerdeck.lowered_module.authoring.backend import PreprocessResult
from lowerdeck.lowered_module.preprocess.directories import Directory, RemoteDirectory, opened
from lowerdeck.serializer import DataEntry, NamedDataStoreOutput, ScalarType, TensorLayout

MAGIC = b"LDRES2\n"
_HEAD = len(MAGIC) + 32


class ResultCache:
    """Keeps results of ``preprocess`` in a directory.

    Safe under concurrent use by threads, processes and machines that share the directory: a
    result appears by one rename. Nothing in it is trusted: an entry counts as absent if it is not
    the user's own or others may write it, if it was kept under another key, and if it is cut short
    or altered. Results are data (bytes and JSON); reading them runs nothing. Behind a URL nobody
    tells whose an entry is: whoever may write there chooses what programs will contain.

    Args:
        directory: Where results are kept; made, for the user alone, if it is not there. It may
            be a URL that ``fsspec`` knows, such as ``s3://bucket/folder``.

    Attributes:
        directory: The same.
        hits: How many results were found.
        misses: How many were not.

    Raises:
        CacheError: The directory cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory: str = os.fspath(directory)
        self._store: Directory | RemoteDirectory = opened(self.directory)
        self.hits: int = 0
        self.misses: int = 0

    def get(self, key: str | None) -> PreprocessResult | None:
        """Return the result kept under ``key``, or None.

        Args:
            key: From ``content_key``; nothing is kept under None.
        """
        found = None if key is None else self._read(key)
        self.hits += found is not None
        self.misses += found is None
        return found

    def put(self, key: str | None, result: Any) -> None:
        """Keep ``result`` under ``key``; where that fails (a full disk), warn and go on without.

        A result with ``delegate_info_meta`` is not kept: that may be any object.

        Args:
            key: From ``content_key``; nothing is kept under None.
            result: What the backend returned.
        """
        for name in ("delegate_info_meta", "_delegate_info_meta"):
            if getattr(result, name, None) is not None:
                return
        if key is None or not isinstance(getattr(result, "processed_bytes", None), bytes):
            return
        content = _encoded(key, result)
        try:
            self._store.write(_name(key), MAGIC + hashlib.sha256(content).digest() + content)
        except OSError as error:
            warnings.warn(
                f"a result of {len(content)} bytes was not kept in the cache "
                f"{self.directory!r}: {error.strerror or error}. Lowering goes on without it",
                UserWarning,
                stacklevel=2,
            )

    def _read(self, key: str) -> PreprocessResult | None:
        try:
            content = self._store.read(_name(key))
        except OSError:
            return None
        body = content[_HEAD:]
        digest = content[len(MAGIC) : _HEAD]
        if not content.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            return None
        try:
            return _decoded(key, body)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            # Whatever is wrong with it, it is none of ours.
            return None


def _name(key: str) -> str:
    return f"{key}.result"


def _encoded(key: str, result: Any) -> bytes:
    store = getattr(result, "data_store_output", None)
    buffers = [bytes(memoryview(blob)) for blob in store.buffers] if store is not None else []
    handles = getattr(result, "debug_handle_map", None)
    head = {
        # Else a file renamed to another key's would be taken for that key's.
        "key": key,
        # Pairs, because JSON knows no int keys.
        "handles": None if handles is None else [[key, list(v)] for key, v in handles.items()],
        "sizes": [len(result.processed_bytes), *map(len, buffers)],
        "pte": None if store is None else _entries(store.pte_data),
        "external": {}
        if store is None
        else {tag: _entries(entries) for tag, entries in store.external_data.items()},
    }
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, result.processed_bytes, *buffers])


def _decoded(key: str, content: bytes) -> PreprocessResult:
    size = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + size])
    sizes = [operator.index(length) for length in head["sizes"]]
    if head["key"] != key or min(sizes) < 0 or 8 + size + sum(sizes) != len(content):
        raise ValueError("another key's, or of another length")
    parts, offset = [], 8 + size
    for length in sizes:
        parts.append(content[offset : offset + length])
        offset += length
    store = None
    if head["pte"] is not None:
        store = NamedDataStoreOutput(
            buffers=list(parts[1:]),
            pte_data=_restored(head["pte"], len(parts) - 1),
            external_data={
                tag: _restored(found, len(parts) - 1) for tag, found in head["external"].items()
            },
        )
    handles = head["handles"]
    return PreprocessResult(
        processed_bytes=parts[0],
        debug_handle_map=None if handles is None else {key: tuple(v) for key, v in handles},
        data_store_output=store,
    )


def _entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [entry.buffer_index, entry.alignment, _layout(getattr(entry, "tensor_layout", None))]
        for key, entry in entries.items()
    }


def _layout(layout: Any) -> list[Any] | None:
    if layout is None:
        return None
    return [int(layout.scalar_type), list(layout.sizes), list(layout.dim_order)]


def _restored(entries: Mapping[str, Any], buffers: int) -> dict[str, DataEntry]:
    if not all(0 <= operator.index(index) < buffers for index, _, _ in entries.values()):
        raise ValueError("an entry of a buffer that is not there")
    return {
        key: DataEntry(
            index,
            operator.index(alignment),
            None if layout is None else _tensor_layout(layout),
        )
        for key, (index, alignment, layout) in entries.items()
    }


def _tensor_layout(layout: list[Any]) -> TensorLayout:
    scalar_type, sizes, dim_order = layout
    return TensorLayout(
        ScalarType(scalar_type), [*map(operator.index, sizes)], [*map(operator.index, dim_order)]
    )
