"""Equal blobs found by a cheap fingerprint first, then compared, then told by digests."""

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
        self._held: dict[int, tuple[memoryview, T]] = {}

    def find(self, view: memoryview) -> T | None:
        """Return the value stored for these bytes, or None."""
        # A view that is held cannot give its id to another one.
        held = self._held.get(id(view))
        if held is not None:
            return held[1]
        key = _fingerprint(view)
        first = self._first.get(key)
        if first is None:
            return None
        if same_bytes(first[0], view):
            found: T | None = first[1]
        else:
            others = self._others.get(key)
            found = others.get(_digest(view)) if others else None
        if found is not None:
            self._held[id(view)] = view, found
        return found

    def add(self, view: memoryview, value: T) -> None:
        """Store ``value`` for these bytes; an earlier value for the same bytes stays first."""
        key = _fingerprint(view)
        first = self._first.setdefault(key, (view, value))
        self._held.setdefault(id(view), (view, value))
        if first[0] is view or same_bytes(first[0], view):
            return
        self._others.setdefault(key, {}).setdefault(_digest(view), value)


def _fingerprint(view: memoryview) -> _Fingerprint:
    # The ends and the middle tell weights of one shape apart without reading the file's gigabytes.
    size = len(view)
    middle = size // 2
    return (
        size,
        view[:_PROBE].tobytes(),
        view[middle : middle + _PROBE].tobytes(),
        view[max(size - _PROBE, 0) :].tobytes(),
    )


def _digest(view: memoryview) -> bytes:
    # 256 bits: nobody can make two contents that collide.
    return blake2b(view, digest_size=32).digest()
