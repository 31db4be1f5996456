"""Equal blobs found by a cheap fingerprint first, and by a digest where fingerprints are equal."""

from __future__ import annotations

from hashlib import blake2b
from typing import Generic, TypeVar

T = TypeVar("T")

_PROBE = 64
_Fingerprint = tuple[int, bytes, bytes, bytes]


class BlobIndex(Generic[T]):
    """A map from contents to values, in which big contents are read only on a likely match.

    Every blob is read whole at most once, however many look alike: comparing each with each
    would let blobs that differ in one hidden byte cost the square of their number.
    """

    def __init__(self) -> None:
        # The first blob of a fingerprint stays unread until a second one comes.
        self._first: dict[_Fingerprint, tuple[memoryview, T]] = {}
        self._digests: dict[_Fingerprint, dict[bytes, T]] = {}
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
        digests = self._digests.get(key)
        if digests is None:
            digests = self._digests[key] = {_digest(first[0]): first[1]}
        found = digests.get(_digest(view))
        if found is not None:
            self._held[id(view)] = view, found
        return found

    def add(self, view: memoryview, value: T) -> None:
        """Store ``value`` for these bytes; an earlier value for the same bytes stays first."""
        key = _fingerprint(view)
        first = self._first.setdefault(key, (view, value))
        self._held.setdefault(id(view), (view, value))
        if first[0] is view:
            return
        digests = self._digests.get(key)
        if digests is None:
            digests = self._digests[key] = {_digest(first[0]): first[1]}
        digests.setdefault(_digest(view), value)


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
