"""A program and its segments as one FlatBuffer."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TypeVar

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.assembly import Assembly
from lowerdeck.serializer.flatbuffer.packing import int_vector, long_vector
from lowerdeck.serializer.flatbuffer.skeleton import SLOT
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.stream import Piece
from lowerdeck.serializer.flatbuffer.wire import FILE_IDENTIFIER, PROGRAM_TABLES
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.encoding.encode_chains import ChainEncoder
from lowerdeck.serializer.pte.encoding.encode_values import ValueEncoder
from lowerdeck.serializer.pte.enums import DataLocation
from lowerdeck.serializer.pte.header import HEADER_START
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.segments import SegmentPlan

T = TypeVar("T")


def encode_program(
    program: schema.Program, plan: SegmentPlan, layout: FileLayout, *, inserted: int
) -> list[Piece]:
    """Return the pieces of the FlatBuffer, with bytes left for the extended header.

    Args:
        program: The program.
        plan: Where its blobs are.
        layout: Alignment of inline delegates.
        inserted: Bytes to leave free for the extended header; 0 for none.

    Raises:
        ProgramError: A field of the program cannot be stored.
    """
    encoder = ProgramEncoder(program, plan, layout, start=HEADER_START + inserted)
    root = encoder.encode()
    head = struct.pack("<I4s", root, FILE_IDENTIFIER).ljust(HEADER_START + inserted, b"\0")
    return encoder.assembly.finish(head)


class ProgramEncoder:
    """Walks one program and fills an assembly."""

    def __init__(
        self, program: schema.Program, plan: SegmentPlan, layout: FileLayout, *, start: int
    ) -> None:
        self.assembly: Assembly = Assembly(
            PROGRAM_TABLES, start=start, blob_alignment=layout.delegate_alignment
        )
        self._program = program
        self._plan = plan
        self._extracted = layout.extract_delegate_segments
        self._inline = [] if self._extracted else program.backend_delegate_data
        self._skeleton = self.assembly.skeleton
        self._words = self.assembly.words
        self._values = ValueEncoder(self.assembly)
        self._chains = ChainEncoder(self.assembly)

    def encode(self) -> int:
        """Write all tables and return the position of the root."""
        program, plan = self._program, self._plan
        empty = self._words.add(int_vector([]))
        root = self._skeleton.table(
            "Program",
            {
                "version": program.version,
                "execution_plan": SLOT,
                "constant_buffer": empty,
                "backend_delegate_data": SLOT if self._inline else empty,
                "segments": SLOT,
                "constant_segment": SLOT,
                "mutable_data_segments": SLOT if plan.mutable else None,
                "named_data": SLOT if plan.named else empty,
            },
        )
        for slot, method in self._slots(root["execution_plan"], program.execution_plan):
            self._skeleton.patch(slot, self._execution_plan(method))
        for slot, segment in self._slots(root["segments"], plan.segments):
            sizes = {"offset": segment.offset, "size": segment.size}
            self._skeleton.patch(slot, self._skeleton.table("DataSegment", sizes)[""])
        self._skeleton.patch(root["constant_segment"], self._subsegments(plan.constants))
        if plan.mutable:
            for slot, offsets in self._slots(root["mutable_data_segments"], [plan.mutable]):
                self._skeleton.patch(slot, self._subsegments(offsets))
        if plan.named:
            for slot, (key, number) in self._slots(root["named_data"], plan.named):
                entry = {"key": self._words.add_string(key), "segment_index": number}
                self._skeleton.patch(slot, self._skeleton.table("NamedData", entry)[""])
        if self._inline:
            self._inline_delegates(root["backend_delegate_data"])
        return root[""]

    def _execution_plan(self, method: schema.ExecutionPlan) -> int:
        words, skeleton = self._words, self._skeleton
        where = f"method {method.name!r}"
        meta, devices = method.container_meta_type, method.non_const_buffer_device
        vectors = self.assembly.vectors
        try:
            plan = skeleton.table(
                "ExecutionPlan",
                {
                    "name": words.add_string(method.name),
                    "container_meta_type": None if meta is None else SLOT,
                    "values": vectors.add(self._values.add_all(method.values, where)),
                    "inputs": words.add(int_vector(method.inputs)),
                    "outputs": words.add(int_vector(method.outputs)),
                    "chains": SLOT,
                    "operators": SLOT,
                    "delegates": SLOT,
                    "non_const_buffer_sizes": self.assembly.longs.add(
                        long_vector(method.non_const_buffer_sizes)
                    ),
                    "non_const_buffer_device": None if devices is None else SLOT,
                },
            )
            if meta is not None:
                self._container_meta(plan["container_meta_type"], meta)
            for number, (slot, chain) in enumerate(self._slots(plan["chains"], method.chains)):
                skeleton.patch(slot, self._chain(chain, f"{where}.chains[{number}]"))
            for slot, operator in self._slots(plan["operators"], method.operators):
                names = {
                    "name": words.add_string(operator.name),
                    "overload": words.add_string(operator.overload),
                }
                skeleton.patch(slot, skeleton.table("Operator", names)[""])
            for slot, delegate in self._slots(plan["delegates"], method.delegates):
                skeleton.patch(slot, self._delegate(delegate))
            if devices is not None:
                self._devices(plan["non_const_buffer_device"], devices)
        except ProgramError as error:
            text = str(error)
            raise (
                error if text.startswith(where) else ProgramError(f"{where}: {text}")
            ) from error
        except (AttributeError, TypeError, struct.error) as error:
            raise ProgramError(f"{where}: a field has the wrong type: {error}") from error
        return plan[""]

    def _container_meta(self, slot: int, meta: schema.ContainerMetadata) -> None:
        specs = {
            "encoded_inp_str": self._words.add_string(meta.encoded_inp_str),
            "encoded_out_str": self._words.add_string(meta.encoded_out_str),
        }
        self._skeleton.patch(slot, self._skeleton.table("ContainerMetadata", specs)[""])

    def _devices(self, place: int, devices: Sequence[schema.NonConstBufferDevice]) -> None:
        for slot, device in self._slots(place, devices):
            fields = {
                "buffer_idx": device.buffer_idx,
                "device_type": device.device_type,
                "device_index": device.device_index,
            }
            self._skeleton.patch(slot, self._skeleton.table("NonConstBufferDevice", fields)[""])

    def _chain(self, chain: schema.Chain, where: str) -> int:
        vectors = self.assembly.vectors
        references = self._chains.add_instructions(chain.instructions, where)
        trace = chain.stacktrace
        fields = {
            "inputs": self._words.add(int_vector(chain.inputs)),
            "outputs": self._words.add(int_vector(chain.outputs)),
            "instructions": vectors.add(references),
            "stacktrace": None
            if trace is None
            else vectors.add(self._chains.add_frame_lists(trace)),
        }
        return self._skeleton.table("Chain", fields)[""]

    def _delegate(self, delegate: schema.BackendDelegate) -> int:
        table = self._skeleton.table(
            "BackendDelegate",
            {
                "id": self._words.add_string(delegate.id),
                "processed": SLOT,
                "compile_specs": SLOT,
            },
        )
        index = delegate.processed.index
        location = DataLocation.INLINE
        if self._extracted:
            location, index = DataLocation.SEGMENT, self._plan.delegates[index]
        reference = self._skeleton.table(
            "BackendDelegateDataReference", {"location": location, "index": index}
        )
        self._skeleton.patch(table["processed"], reference[""])
        for slot, spec in self._slots(table["compile_specs"], delegate.compile_specs):
            fields = {"key": self._words.add_string(spec.key), "value": self._bytes(spec)}
            self._skeleton.patch(slot, self._skeleton.table("CompileSpec", fields)[""])
        return table[""]

    def _bytes(self, spec: schema.CompileSpec) -> int:
        view = byte_view(spec.value, f"compile spec {spec.key!r}")
        return self._words.add(struct.pack("<I", len(view)) + view.tobytes())

    def _subsegments(self, offsets: schema.SubsegmentOffsets | None) -> int:
        if offsets is None:
            offsets = schema.SubsegmentOffsets(0, [0])
        table = self._skeleton.table(
            "SubsegmentOffsets", {"segment_index": offsets.segment_index, "offsets": SLOT}
        )
        self._skeleton.patch(table["offsets"], self._skeleton.wide_vector(offsets.offsets))
        return table[""]

    def _inline_delegates(self, slot: int) -> None:
        for entry_slot, (index, entry) in self._slots(slot, list(enumerate(self._inline))):
            view = byte_view(entry.data, f"backend_delegate_data[{index}]")
            table = self._skeleton.table(
                "BackendDelegateInlineData", {"data": self.assembly.blob(view)}
            )
            self._skeleton.patch(entry_slot, table[""])

    def _slots(self, slot: int, items: Sequence[T]) -> Iterable[tuple[int, T]]:
        position, slots = self._skeleton.vector(len(items))
        self._skeleton.patch(slot, position)
        return zip(slots, items, strict=True)
