"""Store of blobs that backends add under keys and look up at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from lowerdeck.serializer.errors import NamedDataConflictError, ProgramError
from lowerdeck.serializer.flatbuffer.alignment import common_alignment
from lowerdeck.serializer.flatbuffer.blobs import BlobIndex
from lowerdeck.serializer.flatbuffer.limits import MAX_RANK
from lowerdeck.serializer.flatbuffer.storage import byte_view, pickled, same_bytes
from lowerdeck.serializer.pte.enums import ScalarType

if TYPE_CHECKING:
    from lowerdeck.serializer.pte.schema import Storage


@dataclass(slots=True)
class TensorLayout:
    """Type and shape of a tensor in a `.ptd` file.

    Attributes:
        dim_order: Dimensions from the outermost in memory to the innermost.
    """

    scalar_type: ScalarType
    sizes: list[int]
    dim_order: list[int]

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return prod(self.sizes) * self.scalar_type.itemsize

    def problem(self) -> str:
        """Return an error message if the shape is invalid, else ``""``."""
        rank = len(self.sizes)
        is_order = sorted(self.dim_order) == list(range(rank))
        if is_order and rank <= MAX_RANK and min(self.sizes, default=0) >= 0:
            return ""
        return (
            f"found sizes {self.sizes} and dim_order {self.dim_order}, expected sizes of "
            f"0 or more and a permutation of their dimensions, at most {MAX_RANK}"
        )


@dataclass(slots=True)
class DataEntry:
    """One entry of a store.

    Attributes:
        buffer_index: Index into ``NamedDataStoreOutput.buffers``.
        alignment: Alignment of the blob in the file.
        tensor_layout: Type and shape if the blob is a tensor, else None.
    """

    buffer_index: int
    alignment: int
    # ExecuTorch's `exir.save` drops fields whose default is None, and its `load` requires this
    # one.
    tensor_layout: TensorLayout | None = field(default_factory=lambda: None)


@dataclass(slots=True)
class NamedDataStoreOutput:
    """Contents of a store, for the writer.

    Attributes:
        buffers: The distinct blobs.
        pte_data: Entries of the `.pte` by key.
        external_data: For each tag (stem of a `.ptd` file) its entries by key.
    """

    buffers: list[Storage] = field(default_factory=list)
    pte_data: dict[str, DataEntry] = field(default_factory=dict)
    external_data: dict[str, dict[str, DataEntry]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[NamedDataStoreOutput], tuple[object, ...]]:
        """Pickle buffers as bytes."""
        buffers = [pickled(buffer) for buffer in self.buffers]
        return NamedDataStoreOutput, (buffers, self.pte_data, self.external_data)


class NamedDataStore:
    """Blobs under unique keys; equal blobs are stored once.

    Example:
        >>> store = NamedDataStore()
        >>> store.add_named_data("weight", b"1234", alignment=16)
        >>> store.add_named_data("the same bytes", b"1234")
        >>> len(store.get_named_data_store_output().buffers)
        1
    """

    def __init__(self) -> None:
        self._buffers: list[Storage] = []
        self._views: list[memoryview] = []
        self._index: BlobIndex[int] = BlobIndex()
        self._entries: dict[str, DataEntry] = {}
        # The file of each key: None for the `.pte`, else a tag.
        self._tags: dict[str, str | None] = {}

    def __reduce__(self) -> tuple[type[NamedDataStore], tuple[()], NamedDataStoreOutput]:
        """Pickle the contents of the store."""
        return NamedDataStore, (), self.get_named_data_store_output()

    def __setstate__(self, state: NamedDataStoreOutput) -> None:
        """Restore the contents of a pickled store."""
        self.merge_named_data_store(state)

    def add_named_data(
        self,
        key: str,
        data: Storage,
        alignment: int | None = 1,
        external_tag: str | None = None,
        tensor_layout: TensorLayout | None = None,
    ) -> None:
        """Store ``data`` under ``key``.

        An existing key must have the same bytes; it stays in its first file and gets the least
        common multiple of the alignments.

        Args:
            key: The key, unique in the program.
            data: The bytes, stored by reference; do not change them later.
            alignment: Alignment of the blob in the file; None means 1.
            external_tag: Stem of the `.ptd` file to put the blob in, or None for the `.pte`.
            tensor_layout: Type and shape, if the blob is a tensor.

        Raises:
            NamedDataConflictError: The key exists with other bytes or another layout.
            ProgramError: The alignment is not positive or too large, or ``data`` does not support
                the buffer protocol.
        """
        alignment = 1 if alignment is None else alignment
        if alignment <= 0:
            raise ProgramError(
                f"named data {key!r}: found alignment {alignment}, expected at least 1"
            )
        view = byte_view(data, f"named data {key!r}")
        entry = self._matching_entry(key, view, tensor_layout)
        if entry is None:
            self._entries[key] = DataEntry(self._buffer(view, data), alignment, tensor_layout)
            self._tags[key] = external_tag
            return
        entry.alignment = common_alignment(entry.alignment, alignment)
        entry.tensor_layout = entry.tensor_layout or tensor_layout

    def get_named_data_store_output(self) -> NamedDataStoreOutput:
        """Return a snapshot of the store."""
        output = NamedDataStoreOutput(list(self._buffers))
        for key, entry in self._entries.items():
            tag = self._tags[key]
            entries = output.pte_data if tag is None else output.external_data.setdefault(tag, {})
            entries[key] = DataEntry(entry.buffer_index, entry.alignment, entry.tensor_layout)
        return output

    def merge_named_data_store(self, other: NamedDataStoreOutput) -> None:
        """Add all entries of another store; on a conflict nothing is added.

        Raises:
            NamedDataConflictError: A key of both stores has different contents.
        """
        tagged = [(None, other.pte_data), *other.external_data.items()]
        entries = [(tag, key, entry) for tag, named in tagged for key, entry in named.items()]
        # Check everything first, so that an error leaves the store unchanged.
        for _, key, entry in entries:
            view = byte_view(other.buffers[entry.buffer_index], f"named data {key!r}")
            self._matching_entry(key, view, entry.tensor_layout)
        for tag, key, entry in entries:
            data = other.buffers[entry.buffer_index]
            self.add_named_data(key, data, entry.alignment, tag, entry.tensor_layout)

    def _matching_entry(
        self, key: str, view: memoryview, layout: TensorLayout | None
    ) -> DataEntry | None:
        """Return the existing entry of a key after checking its contents, None for a new key."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        stored = self._views[entry.buffer_index]
        if not same_bytes(view, stored):
            raise NamedDataConflictError(
                key, f"{len(view)} bytes", f"{len(stored)} bytes of different content"
            )
        if layout is not None and entry.tensor_layout not in (None, layout):
            raise NamedDataConflictError(key, f"{layout}", f"{entry.tensor_layout}")
        return entry

    def _buffer(self, view: memoryview, data: Storage) -> int:
        index = self._index.find(view)
        if index is None:
            index = len(self._buffers)
            self._buffers.append(data)
            self._views.append(view)
            self._index.add(view, index)
        return index
