"""Read programs from `.pte` files: whole, or part by part on request."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lowerdeck.serializer.collector import collector_held
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.container import ExtendedHeader, open_container
from lowerdeck.serializer.pte.decode import PlanTable, ProgramDecoder
from lowerdeck.serializer.pte.enums import DataLocation
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.resolve import DataUse, SegmentResolver

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def deserialize_pte(data: ReadableBuffer) -> schema.Program:
    """Return the program of a `.pte` file, with buffers as views of ``data``.

    Segments are resolved: constants, initial values, delegates and named data are stored as in a
    program created in memory. Writing the program again reproduces a file that this package wrote
    with default alignments byte for byte.

    Args:
        data: The file: bytes, a memory map, or anything else with the buffer protocol.

    Raises:
        FormatError: The file is malformed.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program, serialize_pte
        >>> deserialize_pte(serialize_pte(Program(execution_plan=[ExecutionPlan("f")]))).version
        0
    """
    return PteFile(byte_view(data, "the file")).program()


def open_pte(path: str | os.PathLike[str]) -> PteFile:
    """Open a `.pte` file as a memory map; parts are decoded on first use.

    Returns:
        The open file; use it in a ``with`` block, or call :meth:`PteFile.close`.

    Raises:
        FormatError: The file's header or root table is malformed.
        OSError: The file cannot be opened.
    """
    mapped = map_file(path)
    # After an error the traceback still holds views; the map is closed with the last of them.
    return PteFile(mapped or b"", mapped)


def map_file(path: str | os.PathLike[str]) -> mmap.mmap | None:
    """Return a memory map of a file, None if it is empty.

    Raises:
        OSError: The file cannot be opened.
    """
    with Path(path).open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return None
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Closing:
    """Base class of context managers that call ``close`` on exit."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the object."""
        self.close()

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class DelegateEntry:
    """One delegate of one method, as stored in the file.

    Attributes:
        method: Name of the method.
        id: Name of the backend.
        location: Whether the delegate's bytes are in the FlatBuffer or a segment.
        index: Index of the segment, or of the inline delegate.
        data: View of the delegate's bytes in the file.
    """

    method: str
    id: str
    location: DataLocation
    index: int
    data: memoryview
    compile_specs: list[schema.CompileSpec]


class PteFile(Closing):
    """A `.pte` file whose parts are decoded on first use and cached.

    Buffers are views of the file and stay valid after it is closed: the file is unmapped when the
    last buffer is released.

    Example:
        >>> from lowerdeck.serializer import ExecutionPlan, Program, serialize_pte
        >>> with PteFile(serialize_pte(Program(execution_plan=[ExecutionPlan("f")]))) as file:
        ...     file.method_names
        ('f',)
    """

    def __init__(
        self, data: ReadableBuffer, mapped: mmap.mmap | None = None, *, strict: bool = False
    ) -> None:
        """Check the header, the root table and the table of segments.

        Args:
            mapped: The memory map, closed with this object.
            strict: Also reject misaligned 8-byte elements, as :func:`verify_pte` does.

        Raises:
            FormatError: The header or one of the tables is malformed.
        """
        self._mapped = mapped
        self._container = open_container(byte_view(data, "the file"))
        self.decoder: ProgramDecoder = ProgramDecoder(self._container.program, strict=strict)
        self._resolver = SegmentResolver(self._container, self.decoder)
        self._methods: dict[int, schema.ExecutionPlan] = {}

    def __getattr__(self, name: str) -> Any:
        """Raise ``ValueError`` after ``close``, which removes all attributes."""
        if not self.__dict__ and not name.startswith("__"):
            raise ValueError("the file is closed; use it inside its with block")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        """Return the kind and the size of the file."""
        state = f"{self.data.nbytes} bytes" if self.__dict__ else "closed"
        return f"<{type(self).__name__} {state}>"

    def close(self) -> None:
        """Close the file; further decoding raises ``ValueError``."""
        mapped = self._mapped
        # All cached objects refer to the map, so all attributes are removed. This also marks the
        # file as closed: `__getattr__` runs only then, so that open files need no check at each
        # access.
        self.__dict__.clear()
        if mapped is not None:
            # Views that the caller still holds keep the map alive.
            with suppress(BufferError):
                mapped.close()

    @property
    def data(self) -> memoryview:
        """Return the whole file."""
        return self._container.data

    @property
    def header(self) -> ExtendedHeader | None:
        """Return the extended header, or None if the file has none."""
        return self._container.header

    @property
    def version(self) -> int:
        """Return the schema version."""
        version: int = self.decoder.version
        return version

    @property
    def program_size(self) -> int:
        """Return the size of the FlatBuffer in bytes."""
        return len(self._container.program)

    @property
    def named_data_segments(self) -> list[int]:
        """Return the segment of each entry of :attr:`named_data`."""
        return [index for _, index in self.decoder.named_data]

    @property
    def segments(self) -> list[schema.DataSegment]:
        """Return the segments, checked to be inside the file."""
        return list(self._resolver.segments)

    def segment(self, index: int) -> memoryview:
        """Return the bytes of one segment.

        Raises:
            SegmentError: The segment does not exist.
        """
        return self._resolver.segment(index, "Program.segments")

    @property
    def constant_segment(self) -> schema.SubsegmentOffsets | None:
        """Return the offsets of the constants, or None for a legacy file with inline constants."""
        return self._resolver.constant_offsets()

    @property
    def mutable_data_segments(self) -> list[schema.SubsegmentOffsets]:
        """Return the offsets of the initial values of mutable buffers."""
        return self.decoder.mutable_data_segments

    @property
    def plan_tables(self) -> tuple[PlanTable, ...]:
        """Return the name of each method, and the positions of its table and vectors."""
        return self.decoder.plans

    @property
    def method_names(self) -> tuple[str, ...]:
        """Return the names of the methods."""
        return tuple(table.name for table in self.plan_tables)

    def method(self, name: str) -> schema.ExecutionPlan:
        """Return one fully decoded method.

        Raises:
            KeyError: The method does not exist.
            FormatError: The method is malformed.
        """
        return self._method(self._index_of(name))

    @cached_property
    def delegates(self) -> list[DelegateEntry]:
        """Return the delegates of all methods."""
        entries = []
        for table in self.plan_tables:
            for number, delegate in enumerate(self.decoder.delegates(table)):
                reference = delegate.processed
                where = f"method {table.name!r}.delegates[{number}].processed"
                view = self._resolver.delegate_bytes(reference, where)
                entries.append(
                    DelegateEntry(
                        *(table.name, delegate.id, reference.location, reference.index),
                        *(view, delegate.compile_specs),
                    )
                )
        return entries

    @cached_property
    def backend_delegate_data(self) -> list[schema.BackendDelegateInlineData]:
        """Return the distinct bytes of delegates, as in :class:`Program`."""
        inline = [view for _, view in self.decoder.inline_delegates]
        segments = [self.segment(index) for index in self._delegate_segments]
        return [schema.BackendDelegateInlineData(view) for view in (*inline, *segments)]

    @cached_property
    def named_data(self) -> list[schema.NamedData]:
        """Return the named data, as in :class:`Program`."""
        return self._resolver.named_data()

    @cached_property
    def constants(self) -> list[schema.Buffer]:
        """Return the constants, as in :class:`Program`.

        The file does not store the sizes of constants, so all methods are decoded to find the
        bytes that tensors use.
        """
        return self._resolver.constants(self._use.constants)

    @cached_property
    def mutable_data(self) -> list[schema.Buffer]:
        """Return the initial values of mutable buffers, as in :class:`Program`."""
        return self._resolver.mutable_data(self._use.mutable)

    @property
    def layout(self) -> FileLayout:
        """Return the layout of the file; alignments inside segments are not inferred."""
        # Without delegates this cannot be inferred; extracting is the default.
        extracted = bool(self._delegate_segments) or not self.decoder.inline_delegates
        return FileLayout(self._resolver.alignment, extract_delegate_segments=extracted)

    def program(self) -> schema.Program:
        """Return the whole program.

        Raises:
            FormatError: The file is malformed.
        """
        return schema.Program(
            self.version,
            [self._method(index) for index in range(len(self.plan_tables))],
            self.constants,
            self.mutable_data,
            self.backend_delegate_data,
            self.named_data,
            self.layout,
        )

    @cached_property
    def _indices(self) -> dict[str, int]:
        """Return method indices by name; of duplicate names the first one."""
        return {name: index for index, name in reversed(list(enumerate(self.method_names)))}

    def _index_of(self, name: str) -> int:
        index = self._indices.get(name)
        if index is None:
            raise KeyError(f"no method {name!r}; the file has {', '.join(self.method_names)}")
        return index

    @cached_property
    def _use(self) -> DataUse:
        use = DataUse()
        for index in range(len(self.plan_tables)):
            use.count(self._method(index).values)
        return use

    @cached_property
    def _delegate_segments(self) -> dict[int, int]:
        """Return the index in ``backend_delegate_data`` of each delegate segment."""
        first = len(self.decoder.inline_delegates)
        numbers: dict[int, int] = {}
        for entry in self.delegates:
            if entry.location is DataLocation.SEGMENT:
                numbers.setdefault(entry.index, first + len(numbers))
        return numbers

    def _method(self, index: int) -> schema.ExecutionPlan:
        plan = self._methods.get(index)
        if plan is None:
            with collector_held():
                plan = self.decoder.plan(self.plan_tables[index])
            for delegate in plan.delegates:
                reference = delegate.processed
                if reference.location is DataLocation.SEGMENT:
                    number = self._delegate_segments[reference.index]
                    delegate.processed = schema.BackendDelegateDataReference(
                        DataLocation.INLINE, number
                    )
            self._methods[index] = plan
        return plan
