"""Find equal blobs: by a cheap fingerprint, then by comparison, then by digests."""

from __future__ import annotations

from hashlib import blake2b
from typing import Generic, TypeVar

from lowerdeck.serializer.flatbuffer.storage import same_bytes

T = TypeVar("T")

_PROBE = 64
_Fingerprint = tuple[int, bytes, bytes, bytes]


class BlobIndex(Generic[T]):
    """A map from contents to values, in which big contents are read only on a likely match.

    A blob is compared with the first that looks like it alone, and by its digest with all others:
    comparing each with each would let blobs that differ in one hidden byte cost the square of
    their number.
    """

    def __init__(self) -> None:
        # The first blob of a fingerprint stays unread until a second one comes.
        self._first: dict[_Fingerprint, tuple[memoryview, T]] = {}
        self._others: dict[_Fingerprint, dict[bytes, T]] = {}
        self._by_id: dict[int, tuple[memoryview, T]] = {}

    def find(self, view: memoryview) -> T | None:
        """Return the value stored for these bytes, or None."""
        # The stored view is kept alive, so that its id is not reused.
        cached = self._by_id.get(id(view))
        if cached is not None:
            return cached[1]
        key = _fingerprint(view)
        first = self._first.get(key)
        if first is None:
            return None
        if same_bytes(first[0], view):
            value: T | None = first[1]
        else:
            others = self._others.get(key)
            value = others.get(_digest(view)) if others else None
        if value is not None:
            self._by_id[id(view)] = view, value
        return value

    def add(self, view: memoryview, value: T) -> None:
        """Store ``value`` for these bytes; an earlier value for the same bytes stays first."""
        key = _fingerprint(view)
        first = self._first.setdefault(key, (view, value))
        self._by_id.setdefault(id(view), (view, value))
        if first[0] is view or same_bytes(first[0], view):
            return
        self._others.setdefault(key, {}).setdefault(_digest(view), value)


def _fingerprint(view: memoryview) -> _Fingerprint:
    # The ends and the middle distinguish weights of one shape without reading gigabytes.
    size = len(view)
    middle = size // 2
    return (
        size,
        view[:_PROBE].tobytes(),
        view[middle : middle + _PROBE].tobytes(),
        view[max(size - _PROBE, 0) :].tobytes(),
    )


def _digest(view: memoryview) -> bytes:
    # 256 bits: collisions cannot be constructed, not even on purpose.
    return blake2b(view, digest_size=32).digest()
