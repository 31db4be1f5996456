"""The page data of delegates."""

from __future__ import annotations

import unicodedata
from typing import Any

from lowerdeck.inspect.report.embed import Interned, clip
from lowerdeck.inspect.report.operators import contents_of
from lowerdeck.serializer import (
    BackendDelegate,
    CompileSpec,
    Program,
    printable,
    resident_view,
    storage_size,
)

_PREVIEW_TEXT = 4096
_PREVIEW_BYTES = 256
_Seen = dict[tuple[int, str], tuple[memoryview, dict[str, Any]]]


class DelegateEntries:
    """Creates the page data of delegates; shared bytes are read once."""

    def __init__(self, program: Program, texts: Interned[str]) -> None:
        """Create an empty cache.

        Args:
            program: The program with the delegates' bytes.
            texts: Table of strings of the page.
        """
        self._program = program
        self._texts = texts
        self._seen: _Seen = {}

    def entry(self, delegate: BackendDelegate, calls: int) -> dict[str, Any]:
        """Return the page data of one delegate.

        Args:
            calls: Number of instructions that call it.

        Returns:
            Backend, size, number of calls, compile specs, and the beginning of the blob as text or
            hex dump. If the blob is readable, also the counts of its operators, the index of a
            text that lists them, and their links; else the reason.
        """
        blobs = self._program.backend_delegate_data
        index = delegate.processed.index
        blob = blobs[index].data if 0 <= index < len(blobs) else b""
        view = resident_view(blob)
        # Blobs of the same range of a file share one view.
        seen = id(view), delegate.id
        if seen not in self._seen:
            self._seen[seen] = view, self._look(view, delegate.id)
        return {
            "id": clip(delegate.id),
            "calls": calls,
            "nbytes": storage_size(blob),
            "specs": [
                {"key": clip(spec.key), "value": spec_text(spec)}
                for spec in delegate.compile_specs
            ],
            **self._seen[seen][1],
        }

    def _look(self, view: memoryview, backend: str) -> dict[str, Any]:
        contents = contents_of(view, backend)
        lines = [*contents.lines]
        if contents.left_out:
            lines.append(f"... and {contents.left_out} more")
        return {
            "ops": [[*item] for item in contents.operators.items()],
            "graph": self._texts.number_of("\n".join(lines)) if lines else -1,
            "links": [[*links] for links in contents.links],
            "results": [[*item] for item in contents.results.items()],
            "closed": contents.closed,
            "preview": blob_preview(view),
        }


def blob_preview(view: memoryview) -> dict[str, Any]:
    """Return the beginning of a blob: ``text`` if it is text, else a ``hex`` dump."""
    text = _text_start(view)
    if text is not None:
        return {"text": text, "more": view.nbytes > _PREVIEW_TEXT}
    head = bytes(view[:_PREVIEW_BYTES])
    return {"hex": hex_dump(head), "more": view.nbytes > len(head)}


def hex_dump(data: bytes) -> str:
    """Return lines of offset, sixteen bytes in hex, and the same bytes as ASCII.

    Example:
        >>> print(hex_dump(b"ET12 eh00"))
        00000000  45 54 31 32 20 65 68 30  30                       |ET12 eh00|
    """
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        halves = [row[:8].hex(" "), row[8:].hex(" ")]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {halves[0]:<23}  {halves[1]:<23}  |{letters}|")
    return "\n".join(lines)


def _text_start(view: memoryview) -> str | None:
    head = bytes(view[:_PREVIEW_TEXT])
    # The end may split a character of up to four bytes.
    for cut in range(min(4, len(head))):
        try:
            text = head[: len(head) - cut].decode()
        except UnicodeDecodeError:
            continue
        is_text = all(c in "\n\t" or unicodedata.category(c) != "Cc" for c in text)
        return "\n".join(map(printable, text.expandtabs(4).split("\n"))) if is_text else None
    return None


def spec_text(spec: CompileSpec) -> str:
    """Return the beginning of a compile spec as printable text."""
    value = resident_view(spec.value)
    text = printable(bytes(value[:_PREVIEW_TEXT]).decode("utf-8", "backslashreplace"))
    left_out = len(value) - _PREVIEW_TEXT
    return f"{text} ... and {left_out} bytes more" if left_out > 0 else text
