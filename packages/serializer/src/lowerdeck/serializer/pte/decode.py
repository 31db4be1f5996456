"""Decode the tables of a program part by part, on request."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from lowerdeck.serializer.flatbuffer.objects import ObjectReader
from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.pte import schema


class PlanTable(NamedTuple):
    """Name of one method and positions of its table and vectors, 0 if absent."""

    name: str
    position: int
    container_meta_type: int
    values: int
    inputs: int
    outputs: int
    chains: int
    operators: int
    delegates: int
    non_const_buffer_sizes: int
    non_const_buffer_device: int


class ProgramDecoder:
    """Decodes the parts of one FlatBuffer.

    Attributes:
        version: Version of the schema.
        execution_plan: Position of the vector of methods, 0 if absent.
        segment_table: Position of the vector of segments.
    """

    def __init__(self, data: memoryview, *, strict: bool = False) -> None:
        """Read the root table.

        Args:
            data: The FlatBuffer, from the start of the file.

        Raises:
            FormatError: The root table is malformed.
        """
        self._objects = ObjectReader(data, schema.PROGRAM_FORMAT, strict=strict)
        self.reader: TableReader = self._objects.tables
        self.version: int
        self.execution_plan: int
        self.segment_table: int
        (
            self.version,
            self.execution_plan,
            self._constant_buffer,
            self._inline_delegates,
            self.segment_table,
            self._constant_segment,
            self._mutable_segments,
            self._named_data,
        ) = self.reader.fields("Program", root_position(data))

    @cached_property
    def plans(self) -> tuple[PlanTable, ...]:
        """Return the positions of the parts of every method."""
        tables = []
        for at in self.reader.tables(self.execution_plan, "Program.execution_plan"):
            name, *vectors = self.reader.fields("ExecutionPlan", at)
            tables.append(PlanTable(self.reader.string(name, "ExecutionPlan.name"), at, *vectors))
        return tuple(tables)

    def plan(self, table: PlanTable) -> schema.ExecutionPlan:
        """Return one fully decoded method."""
        plan: schema.ExecutionPlan = self._objects.object_at(table.position, "ExecutionPlan")
        return plan

    def delegates(self, table: PlanTable) -> list[schema.BackendDelegate]:
        """Return the delegates of a method, with data references as stored in the file."""
        return self._objects.objects(table.delegates, "BackendDelegate", "ExecutionPlan.delegates")

    @cached_property
    def segments(self) -> list[schema.DataSegment]:
        """Return the segments as stored, not checked against the file size."""
        return self._objects.objects(self.segment_table, "DataSegment", "Program.segments")

    @cached_property
    def constant_segment(self) -> schema.SubsegmentOffsets | None:
        """Return the offsets of the constants, or None for a legacy file."""
        at = self._constant_segment
        return self._objects.object_at(at, "SubsegmentOffsets") if at else None

    @cached_property
    def mutable_data_segments(self) -> list[schema.SubsegmentOffsets]:
        """Return the offsets of initial values: none or one entry in known files."""
        field = "Program.mutable_data_segments"
        return self._objects.objects(self._mutable_segments, "SubsegmentOffsets", field)

    @cached_property
    def named_data(self) -> list[tuple[str, int]]:
        """Return the keys of the named data and their segments."""
        entries = []
        for at in self.reader.tables(self._named_data, "Program.named_data"):
            key, segment = self.reader.fields("NamedData", at)
            entries.append((self.reader.string(key, "NamedData.key"), segment))
        return entries

    @property
    def has_constant_buffer(self) -> bool:
        """Return whether constants are in the FlatBuffer."""
        vector = self._constant_buffer
        return bool(vector and self.reader.count(vector, 4, "Program.constant_buffer"))

    @cached_property
    def constant_buffer(self) -> list[tuple[int, memoryview]]:
        """Return the offset and bytes of each inline constant of a legacy file."""
        return self._blobs(self._constant_buffer, "Buffer", "Program.constant_buffer")

    @cached_property
    def inline_delegates(self) -> list[tuple[int, memoryview]]:
        """Return the offset and bytes of each inline delegate."""
        field = "Program.backend_delegate_data"
        return self._blobs(self._inline_delegates, "BackendDelegateInlineData", field)

    def _blobs(self, vector: int, name: str, field: str) -> list[tuple[int, memoryview]]:
        blobs = []
        for at in self.reader.tables(vector, field):
            (data,) = self.reader.fields(name, at)
            blobs.append((data + 4 if data else 0, self.reader.bytes_at(data, field)))
        return blobs
