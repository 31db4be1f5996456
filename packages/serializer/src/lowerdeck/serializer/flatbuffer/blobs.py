"""Find equal blobs by fingerprint, then by comparison or digest."""

from __future__ import annotations

from hashlib import blake2b
from typing import Generic, TypeVar

from lowerdeck.serializer.flatbuffer.storage import same_bytes

T = TypeVar("T")

_PROBE = 64
_Fingerprint = tuple[int, bytes, bytes, bytes]


class BlobIndex(Generic[T]):
    """A map from blobs to values that reads large blobs only on a likely match.

    A blob is compared byte by byte with the first blob of the same fingerprint, and by digest with
    the others: comparing all pairs would take quadratic time if many fingerprints are equal.
    """

    def __init__(self) -> None:
        # The first blob of a fingerprint is not read until a second one is added.
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
        """Store ``value`` for these bytes, unless they already have one."""
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
    # 256 bits, so that collisions cannot be constructed.
    return blake2b(view, digest_size=32).digest()
