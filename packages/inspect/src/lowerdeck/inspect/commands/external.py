"""The summary of a `.ptd` file: its entries, largest first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowerdeck.inspect.commands.answers import share_text, size_text
from lowerdeck.inspect.report.values import dtype_name
from lowerdeck.serializer import ExternalEntry, PtdFile, storage_size

SUMMARY_VERSION = 1
_MOST_ROWS = 20


def is_external(path: Path) -> bool:
    """Return whether a file has the file identifier of a `.ptd`, regardless of its name.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        return file.read(8)[4:] == b"FT01"


def summarise_external(file: PtdFile, size: int) -> dict[str, Any]:
    """Return a JSON-compatible summary of a `.ptd` file.

    Scripts rely on its keys: new versions may add keys, but never rename one.

    Args:
        size: Size of the file in bytes.

    Returns:
        ``summary_version``, ``kind``, ``size``, ``version``, ``segment_alignment`` and
        ``entries``, the largest first.
    """
    entries = [_entry(key, entry) for key, entry in file.entries.items()]
    return {
        "summary_version": SUMMARY_VERSION,
        "kind": "ptd",
        "size": size,
        "version": file.data.version,
        "segment_alignment": file.data.segment_alignment,
        "entries": sorted(entries, key=lambda entry: (-entry["size"], entry["key"])),
    }


def external_lines(name: str, summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the text output."""
    entries = summary["entries"]
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
    version = f"schema version {summary['version']}"
    yield f"{name}: {size_text(summary['size'])}, external data, {version}, {count}"
    if entries:
        yield ""
    rows = entries[:_MOST_ROWS]
    width = max((len(entry["text"]) for entry in rows), default=0)
    for entry in rows:
        share = share_text(entry["size"], summary["size"])
        size = size_text(entry["size"])
        yield f"  {size:>9}  {share:>7}  {entry['text']:<{width}}  {entry['key']}"
    if len(entries) > _MOST_ROWS:
        yield f"    ... and {len(entries) - _MOST_ROWS} more (--json shows all)"


def _entry(key: str, entry: ExternalEntry) -> dict[str, Any]:
    layout, size = entry.tensor_layout, storage_size(entry.data)
    common: dict[str, Any] = {"key": key, "size": size, "alignment": entry.alignment}
    if layout is None:
        return {**common, "kind": "bytes", "text": "bytes"}
    return {
        **common,
        "kind": "tensor",
        "text": f"{dtype_name(layout.scalar_type)}{list(layout.sizes)}",
        "dtype": dtype_name(layout.scalar_type),
        "sizes": list(layout.sizes),
        "dim_order": list(layout.dim_order),
    }
