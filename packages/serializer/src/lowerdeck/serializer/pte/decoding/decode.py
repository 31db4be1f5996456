"""The tables of a program, decoded one by one on request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from lowerdeck.serializer.errors import MissingFieldError
from lowerdeck.serializer.flatbuffer.limits import OBJECT_COST
from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.flatbuffer.wire import PROGRAM_TABLES
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.decoding.decode_chains import ChainDecoder
from lowerdeck.serializer.pte.decoding.decode_values import DEVICES, ValueDecoder, member
from lowerdeck.serializer.pte.enums import DataLocation

T = TypeVar("T")
P = ParamSpec("P")
_DATA_LOCATIONS = {int(location): location for location in DataLocation}


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Where the parts of one method are, before they are decoded.

    Attributes:
        name: Name of the method.
        position: Where its table is.
        container_meta_type: Position of the pytree specs, 0 if absent; so for the others.
        values: Position of the vector of values.
        inputs: Position of the vector of inputs.
        outputs: Position of the vector of outputs.
        chains: Position of the vector of chains.
        operators: Position of the vector of operators.
        delegates: Position of the vector of delegates.
        non_const_buffer_sizes: Position of the vector of memory sizes.
        non_const_buffer_device: Position of the vector of devices.
    """

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


def _paid_once(
    decode: Callable[Concatenate[ProgramDecoder, P], T],
) -> Callable[Concatenate[ProgramDecoder, P], T]:
    """Let decoding the same part again not count again: a file may be looked at for ever."""

    def wrapper(self: ProgramDecoder, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # Two methods may share a table, and both count: a part is told by the object that it
        # was asked with, which is kept so that its id stays its own.
        key = (decode.__name__, *map(id, args))
        if key in self.paid:
            with self.reader.unpaid():
                return decode(self, *args, **kwargs)
        made = decode(self, *args, **kwargs)
        self.paid[key] = args
        return made

    wrapper.__doc__ = decode.__doc__
    return wrapper


class ProgramDecoder:
    """Decodes the parts of one FlatBuffer."""

    def __init__(self, data: memoryview, *, strict: bool = False) -> None:
        """Read the root table.

        Args:
            data: The FlatBuffer, from the start of the file.
            strict: As for :class:`TableReader`.

        Raises:
            FormatError: The root table is malformed.
        """
        reader = TableReader(data, PROGRAM_TABLES, strict=strict)
        self.reader: TableReader = reader
        self.paid: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._values = ValueDecoder(reader)
        self._chains = ChainDecoder(reader)
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
        ) = reader.fields("Program", root_position(data))

    @_paid_once
    def plans(self) -> list[PlanTable]:
        """Return where the parts of every method are."""
        return [self._plan(at) for at in self._each(self.execution_plan, "Program.execution_plan")]

    @_paid_once
    def plan(self, table: PlanTable) -> schema.ExecutionPlan:
        """Return one method, decoded whole."""
        devices = table.non_const_buffer_device
        return schema.ExecutionPlan(
            table.name,
            self.container_meta_type(table),
            self.values(table),
            self.reader.scalars(table.inputs, "i32", "ExecutionPlan.inputs"),
            self.reader.scalars(table.outputs, "i32", "ExecutionPlan.outputs"),
            [self._chains.chain(at) for at in self._each(table.chains, "ExecutionPlan.chains")],
            self.operators(table),
            self.delegates(table),
            self.memory_sizes(table),
            self._devices(devices) if devices else None,
        )

    @_paid_once
    def container_meta_type(self, table: PlanTable) -> schema.ContainerMetadata | None:
        """Return the pytree specs of a method, or None."""
        if not table.container_meta_type:
            return None
        what = "ContainerMetadata"
        given, returned = self.reader.fields(what, table.container_meta_type)
        return schema.ContainerMetadata(
            self.reader.string(given, f"{what}.encoded_inp_str") if given else "",
            self.reader.string(returned, f"{what}.encoded_out_str") if returned else "",
        )

    @_paid_once
    def values(self, table: PlanTable) -> list[schema.EValue]:
        """Return the values of a method."""
        value = self._values.value
        return [value(at) for at in self.reader.tables(table.values, "ExecutionPlan.values")]

    @_paid_once
    def operators(self, table: PlanTable) -> list[schema.Operator]:
        """Return the operators of a method."""
        found = []
        for at in self._each(table.operators, "ExecutionPlan.operators"):
            name, overload = self.reader.fields("Operator", at)
            found.append(
                schema.Operator(
                    self.reader.string(name, "Operator.name"),
                    self.reader.string(overload, "Operator.overload") if overload else "",
                )
            )
        return found

    @_paid_once
    def delegates(self, table: PlanTable) -> list[schema.BackendDelegate]:
        """Return the delegates of a method, their data references as they are in the file."""
        return [
            self._delegate(at) for at in self._each(table.delegates, "ExecutionPlan.delegates")
        ]

    @_paid_once
    def memory_sizes(self, table: PlanTable) -> list[int]:
        """Return the sizes of the planned memories of a method."""
        field = "ExecutionPlan.non_const_buffer_sizes"
        return self.reader.scalars(table.non_const_buffer_sizes, "i64", field)

    @_paid_once
    def segments(self) -> list[schema.DataSegment]:
        """Return the segments as the file lists them, unchecked against its size."""
        return [
            schema.DataSegment(*self.reader.fields("DataSegment", at))
            for at in self._each(self.segment_table, "Program.segments")
        ]

    @_paid_once
    def constant_segment(self) -> schema.SubsegmentOffsets | None:
        """Return where the constants start, or None in a legacy file."""
        return self._subsegments(self._constant_segment) if self._constant_segment else None

    @_paid_once
    def mutable_data_segments(self) -> list[schema.SubsegmentOffsets]:
        """Return where the initial values start: none or one entry in known files."""
        return [
            self._subsegments(at)
            for at in self._each(self._mutable_segments, "Program.mutable_data_segments")
        ]

    @_paid_once
    def named_data(self) -> list[tuple[str, int]]:
        """Return the keys of the named data with their segments."""
        found = []
        for at in self._each(self._named_data, "Program.named_data"):
            key, segment = self.reader.fields("NamedData", at)
            found.append((self.reader.string(key, "NamedData.key"), segment))
        return found

    @property
    def has_constant_buffer(self) -> bool:
        """Return whether constants are in the FlatBuffer."""
        vector = self._constant_buffer
        return bool(vector and self.reader.count(vector, 4, "Program.constant_buffer"))

    @_paid_once
    def constant_buffer(self) -> list[memoryview]:
        """Return the inline constants of a legacy file."""
        return [
            self.reader.bytes_at(self.reader.fields("Buffer", at)[0], "Buffer.storage")
            for at in self._each(self._constant_buffer, "Program.constant_buffer")
        ]

    @_paid_once
    def constant_positions(self) -> list[tuple[int, int]]:
        """Return where each inline constant of a legacy file starts, and its size."""
        found = []
        for at in self._each(self._constant_buffer, "Program.constant_buffer"):
            (data,) = self.reader.fields("Buffer", at)
            size = self.reader.count(data, 1, "Buffer.storage") if data else 0
            found.append((data + 4 if data else 0, size))
        return found or [(0, 0)]

    @_paid_once
    def inline_delegates(self) -> list[tuple[int, memoryview]]:
        """Return the delegates in the FlatBuffer: where each starts, and its bytes."""
        what = "BackendDelegateInlineData"
        found = []
        for at in self._each(self._inline_delegates, "Program.backend_delegate_data"):
            (data,) = self.reader.fields(what, at)
            found.append((data + 4 if data else 0, self.reader.bytes_at(data, f"{what}.data")))
        return found

    def _each(self, vector: int, field: str) -> list[int]:
        positions = list(self.reader.tables(vector, field))
        self.reader.spend(OBJECT_COST * len(positions), field, vector)
        return positions

    def _plan(self, position: int) -> PlanTable:
        name, *rest = self.reader.fields("ExecutionPlan", position)
        return PlanTable(self.reader.string(name, "ExecutionPlan.name"), position, *rest)

    def _delegate(self, position: int) -> schema.BackendDelegate:
        name, processed, specs = self.reader.fields("BackendDelegate", position)
        if not processed:
            raise MissingFieldError(
                "found no reference to data", field="BackendDelegate.processed", offset=position
            )
        what = "BackendDelegateDataReference"
        location, index = self.reader.fields(what, processed)
        return schema.BackendDelegate(
            self.reader.string(name, "BackendDelegate.id"),
            schema.BackendDelegateDataReference(
                member(_DATA_LOCATIONS, location, f"{what}.location", processed), index
            ),
            [self._compile_spec(at) for at in self._each(specs, "BackendDelegate.compile_specs")],
        )

    def _compile_spec(self, position: int) -> schema.CompileSpec:
        key, value = self.reader.fields("CompileSpec", position)
        if not value:
            raise MissingFieldError("found no value", field="CompileSpec.value", offset=position)
        return schema.CompileSpec(
            self.reader.string(key, "CompileSpec.key"),
            self.reader.bytes_at(value, "CompileSpec.value"),
        )

    def _subsegments(self, position: int) -> schema.SubsegmentOffsets:
        segment, offsets = self.reader.fields("SubsegmentOffsets", position)
        return schema.SubsegmentOffsets(
            segment, self.reader.scalars(offsets, "u64", "SubsegmentOffsets.offsets")
        )

    def _devices(self, vector: int) -> list[schema.NonConstBufferDevice]:
        what = "NonConstBufferDevice"
        found = []
        for at in self._each(vector, "ExecutionPlan.non_const_buffer_device"):
            buffer, device, index = self.reader.fields(what, at)
            kind = member(DEVICES, device, f"{what}.device_type", at)
            found.append(schema.NonConstBufferDevice(buffer, kind, index))
        return found
