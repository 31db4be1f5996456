"""Equal blobs found without hashing them: a cheap fingerprint, then a comparison."""

from __future__ import annotations

from typing import Generic, TypeVar

from lowerdeck.serializer.storage import same_bytes

T = TypeVar("T")

_PROBE = 64


class BlobIndex(Generic[T]):
    """A map from contents to values, in which big contents are read only on a likely match."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, bytes, bytes, bytes], list[tuple[memoryview, T]]] = {}

    def find(self, view: memoryview) -> T | None:
        """Return the value stored for these bytes, or None."""
        for other, value in self._seen.get(_fingerprint(view), ()):
            if same_bytes(view, other):
                return value
        return None

    def add(self, view: memoryview, value: T) -> None:
        """Store ``value`` for these bytes; an earlier value for the same bytes stays first."""
        self._seen.setdefault(_fingerprint(view), []).append((view, value))


def _fingerprint(view: memoryview) -> tuple[int, bytes, bytes, bytes]:
    # The ends and the middle tell weights of one shape apart without reading the file's gigabytes.
    size = len(view)
    middle = size // 2
    return (
        size,
        view[:_PROBE].tobytes(),
        view[middle : middle + _PROBE].tobytes(),
        view[max(size - _PROBE, 0) :].tobytes(),
    )
