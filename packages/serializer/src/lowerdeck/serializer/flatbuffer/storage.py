"""References to bytes without copies: buffers, and ranges of files."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from os import PathLike, fspath, fstat
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from lowerdeck.serializer.errors import ProgramError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@dataclass(frozen=True, slots=True)
class FileRange:
    """A byte range of another file, mapped on use."""

    path: str | PathLike[str]
    offset: int
    length: int

    def map(self) -> memoryview:
        """Return the bytes as a read-only view of a memory map of the file.

        Raises:
            ProgramError: The offset or length is negative, or the file is shorter than the range.
            OSError: The file cannot be opened.
        """
        if self.offset < 0 or self.length < 0:
            raise ProgramError(f"{self}: found a negative offset or length")
        with Path(self.path).open("rb") as file:
            size = fstat(file.fileno()).st_size
            if self.offset + self.length > size:
                raise ProgramError(
                    f"{self}: the file holds only {size} bytes; was it truncated after it was "
                    "written?"
                )
            if not self.length:
                return memoryview(b"")
            # A memory map must start at a multiple of the granularity.
            start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
            length = self.offset - start + self.length
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
        return memoryview(mapped)[self.offset - start :]


def byte_view(storage: ReadableBuffer | FileRange, what: str) -> memoryview:
    """Return the bytes of ``storage`` as a flat view, without a copy.

    Args:
        storage: A buffer, or a range of a file.
        what: Description of the bytes, for error messages.

    Raises:
        ProgramError: ``storage`` does not support the buffer protocol, is not contiguous, or is a
            range that its file does not have.
        OSError: The file of a range cannot be opened.
    """
    if isinstance(storage, FileRange):
        return storage.map()
    if _is_flat(storage):
        # Return the same object, so that equal contents can be found by identity.
        return storage
    try:
        view = memoryview(storage)
    except TypeError:
        if isinstance(storage, str | PathLike):
            raise ProgramError(
                f"{what}: found {fspath(storage)!r}, expected bytes; to use a file by its path "
                "call open_pte or open_ptd"
            ) from None
        raise ProgramError(
            f"{what}: found a {type(storage).__name__}, which has no buffer; expected bytes, a "
            "memoryview, an array or a FileRange (for a torch tensor give tensor.numpy())"
        ) from None
    if not view.c_contiguous:
        raise ProgramError(f"{what}: found a strided buffer, expected contiguous bytes")
    if _is_flat(view):
        return view
    # memoryview cannot cast a view with a dimension of 0.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _is_flat(storage: object) -> TypeGuard[memoryview]:
    return (
        type(storage) is memoryview
        and storage.format == "B"
        and storage.ndim == 1
        and storage.c_contiguous
    )


def storage_size(storage: ReadableBuffer | FileRange) -> int:
    """Return the number of bytes of a buffer or a range of a file.

    Args:
        storage: A buffer, or a range of a file.
    """
    return storage.length if isinstance(storage, FileRange) else memoryview(storage).nbytes


def pickled(storage: ReadableBuffer | FileRange) -> bytes | FileRange:
    """Return ``storage`` in a form that can be pickled, which a memoryview cannot.

    Args:
        storage: A buffer, copied unless it is bytes, or a file range, returned unchanged.
    """
    if isinstance(storage, bytes | FileRange):
        return storage
    return bytes(memoryview(storage))


def resident_view(storage: ReadableBuffer | FileRange) -> memoryview:
    """Return a flat view of a buffer, or an empty view for a file range, which is not read.

    Args:
        storage: A buffer, copied if it is not contiguous, or a range of a file.
    """
    if isinstance(storage, FileRange):
        return memoryview(b"")
    if _is_flat(storage):
        return storage
    view = memoryview(storage)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


# Small enough that both copies fit into a core's cache.
_CHUNK = 1 << 18


def same_bytes(left: memoryview, right: memoryview) -> bool:
    """Return whether two flat views have the same bytes, comparing copies of small slices.

    memoryview's own ``==`` unpacks each element, which is slower.
    """
    if len(left) != len(right):
        return False
    return all(
        left[i : i + _CHUNK].tobytes() == right[i : i + _CHUNK].tobytes()
        for i in range(0, len(left), _CHUNK)
    )
