"""Bytes in a form that can be pickled: a view on another's memory cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowerdeck.serializer.flatbuffer.storage import FileRange

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def pickled(storage: ReadableBuffer | FileRange) -> bytes | FileRange:
    """Return bytes that can be pickled.

    Args:
        storage: A buffer, copied unless it is bytes, or a range of a file, which stays one.
    """
    if isinstance(storage, bytes | FileRange):
        return storage
    return bytes(memoryview(storage))
