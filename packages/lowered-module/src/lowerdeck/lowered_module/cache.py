"""A directory of what backends returned, by content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowerdeck.lowered_module.backend import PreprocessResult
from lowerdeck.serializer import DataEntry, NamedDataStoreOutput, ScalarType, TensorLayout

MAGIC = b"LDRES1\n"


class ResultCache:
    """Keeps results of ``preprocess`` in a directory.

    Safe under concurrent use by threads, processes and machines that share the directory: a
    result appears by one rename. A file that is cut short or altered counts as absent. Results
    are data (bytes and JSON); reading them runs nothing.

    Args:
        directory: Where results are kept; made if it is not there.

    Attributes:
        hits: How many results were found.
        misses: How many were not.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory: Path = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.hits: int = 0
        self.misses: int = 0

    def get(self, key: str | None) -> PreprocessResult | None:
        """Return the result kept under ``key``, or None.

        Args:
            key: From ``content_key``; nothing is kept under None.
        """
        found = None if key is None else self._read(self._path(key))
        self.hits += found is not None
        self.misses += found is None
        return found

    def put(self, key: str | None, result: Any) -> None:
        """Keep ``result`` under ``key``.

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
        content = _encoded(result)
        handle, temporary = tempfile.mkstemp(dir=self.directory, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(content).digest() + content)
            Path(temporary).replace(self._path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.result"

    @staticmethod
    def _read(path: Path) -> PreprocessResult | None:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        start = len(MAGIC) + 32
        body = content[start:]
        digest = content[len(MAGIC) : start]
        if not content.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            return None
        return _decoded(body)


def _encoded(result: Any) -> bytes:
    store = getattr(result, "data_store_output", None)
    buffers = [bytes(memoryview(blob)) for blob in store.buffers] if store is not None else []
    handles = getattr(result, "debug_handle_map", None)
    head = {
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


def _decoded(content: bytes) -> PreprocessResult:
    size = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + size])
    parts, offset = [], 8 + size
    for length in head["sizes"]:
        parts.append(content[offset : offset + length])
        offset += length
    store = None
    if head["pte"] is not None:
        store = NamedDataStoreOutput(
            buffers=list(parts[1:]),
            pte_data=_restored(head["pte"]),
            external_data={tag: _restored(found) for tag, found in head["external"].items()},
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


def _restored(entries: Mapping[str, Any]) -> dict[str, DataEntry]:
    return {
        key: DataEntry(index, alignment, None if layout is None else _tensor_layout(layout))
        for key, (index, alignment, layout) in entries.items()
    }


def _tensor_layout(layout: list[Any]) -> TensorLayout:
    scalar_type, sizes, dim_order = layout
    return TensorLayout(ScalarType(scalar_type), sizes, dim_order)
