"""Resolve segments to the fields of a logical program, as views without copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

from lowerdeck.serializer.errors import ContentError, IndexRangeError, LimitError, SegmentError
from lowerdeck.serializer.flatbuffer.limits import MAX_OVERLAP
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.container import Container
from lowerdeck.serializer.pte.decode import ProgramDecoder
from lowerdeck.serializer.pte.enums import DataLocation, TensorDataLocation
from lowerdeck.serializer.pte.layout import segment_alignment


@dataclass(slots=True)
class DataUse:
    """Number of bytes of each constant and initial value that tensors use, by index."""

    constants: dict[int, int] = field(default_factory=dict)
    mutable: dict[int, int] = field(default_factory=dict)

    def count(self, values: Iterable[schema.EValue]) -> None:
        """Add the tensors of one method."""
        for value in values:
            tensor = value.val
            if type(tensor) is not schema.Tensor or not tensor.data_buffer_idx:
                continue
            extra = tensor.extra_tensor_info
            if extra is not None and extra.location is TensorDataLocation.EXTERNAL:
                continue
            use = self.constants if tensor.allocation_info is None else self.mutable
            index = tensor.data_buffer_idx
            use[index] = max(use.get(index, 0), tensor.nbytes)


class SegmentResolver:
    """Resolves the segments of one file to constants, initial values, delegates and named data."""

    def __init__(self, container: Container, decoder: ProgramDecoder) -> None:
        """Read the segment table.

        Raises:
            FormatError: A segment is malformed or extends beyond the file.
        """
        self.container = container
        self.decoder = decoder
        self.segments: list[schema.DataSegment] = decoder.segments
        for index, segment in enumerate(self.segments):
            container.check_segment(index, segment)
        self._views: dict[tuple[int, int], memoryview] = {}
        check_overlap(self.segments, len(container.data), "Program.segments")

    @cached_property
    def alignment(self) -> int:
        """Return the alignment of the segments, inferred from their offsets."""
        offsets = (segment.offset for segment in self.segments)
        return segment_alignment([self.container.segment_base, *offsets])

    def segment(self, index: int, where: str) -> memoryview:
        """Return the bytes of one segment.

        Raises:
            SegmentError: The segment does not exist.
        """
        view = self.container.segment(index, self.segments, where)
        # One view per range, so that equal contents can be found by identity.
        return self._views.setdefault((self.segments[index].offset, len(view)), view)

    def named_data(self) -> list[schema.NamedData]:
        """Return the named data with their bytes and alignments."""
        entries = []
        for number, (key, index) in enumerate(self.decoder.named_data):
            view = self.segment(index, f"Program.named_data[{number}].segment_index")
            entries.append(schema.NamedData(key, view, self.alignment))
        return entries

    def constant_offsets(self) -> schema.SubsegmentOffsets | None:
        """Return the offsets of the constants, or None for a legacy file.

        Raises:
            ContentError: The file has constants in the FlatBuffer and in a segment.
        """
        offsets = self.decoder.constant_segment
        if offsets is None or not offsets.offsets:
            return None
        if self.decoder.has_constant_buffer:
            raise ContentError(
                "found constants both inline and in a segment, which the runtime rejects",
                field="Program.constant_buffer",
            )
        return offsets

    def constants(self, use: Mapping[int, int]) -> list[schema.Buffer]:
        """Return the constants, including the reserved entry 0.

        Args:
            use: Number of bytes that tensors use, by index of the entry.
        """
        offsets = self.constant_offsets()
        if offsets is None:
            inline = self.decoder.constant_buffer
            return [schema.Buffer(view) for _, view in inline] or [schema.Buffer(b"")]
        return self._subsegments(offsets, use, "Program.constant_segment")

    def mutable_data(self, use: Mapping[int, int]) -> list[schema.Buffer]:
        """Return the initial values of mutable buffers, including the reserved entry 0.

        Args:
            use: As for :meth:`constants`.

        Raises:
            ContentError: The file has several segments of initial values.
        """
        entries = self.decoder.mutable_data_segments
        if not entries:
            return [schema.Buffer(b"")]
        if len(entries) > 1:
            raise ContentError(
                f"found {len(entries)} entries, of which the runtime uses only the first",
                field="Program.mutable_data_segments",
            )
        return self._subsegments(entries[0], use, "Program.mutable_data_segments[0]")

    def delegate_bytes(
        self, reference: schema.BackendDelegateDataReference, where: str
    ) -> memoryview:
        """Return the bytes of a delegate.

        Raises:
            FormatError: The reference is out of range.
        """
        if reference.location is DataLocation.SEGMENT:
            return self.segment(reference.index, where)
        inline = self.decoder.inline_delegates
        if reference.index >= len(inline):
            raise IndexRangeError(
                f"found index {reference.index}, expected one of {len(inline)} inline delegates",
                field=where,
            )
        return inline[reference.index][1]

    def _subsegments(
        self, table: schema.SubsegmentOffsets, use: Mapping[int, int], where: str
    ) -> list[schema.Buffer]:
        offsets = table.offsets
        if len(offsets) < 2:
            return [schema.Buffer(b"")]
        data = self.segment(table.segment_index, f"{where}.segment_index")
        # Entries with the same offset share bytes: the longest use counts for all.
        used: dict[int, int] = {}
        for index, offset in enumerate(offsets[1:], 1):
            size = use.get(index, 0)
            used[offset] = max(size, used.get(offset, 0))
            if offset + size > len(data):
                raise SegmentError(
                    f"found {size} bytes from {offset} on in a segment of {len(data)} bytes",
                    field=f"{where}.offsets[{index}]",
                )
        # Sizes are not stored: an entry that no tensor uses ends where the next one starts.
        starts = sorted(used)
        lengths = {
            offset: used[offset] or follower - offset
            for offset, follower in zip_longest(starts, starts[1:], fillvalue=len(data))
        }
        if sum(lengths.values()) > MAX_OVERLAP * len(data):
            raise LimitError(
                f"found overlapping contents of {sum(lengths.values())} bytes in a segment of "
                f"{len(data)}, expected at most {MAX_OVERLAP} times its size",
                field=f"{where}.offsets",
            )
        # One view per range, so that equal contents can be found by identity.
        views = {offset: data[offset : offset + length] for offset, length in lengths.items()}
        return [schema.Buffer(b""), *(schema.Buffer(views[offset]) for offset in offsets[1:])]


def check_overlap(segments: Iterable[schema.DataSegment], size: int, where: str) -> None:
    """Raise if segments overlap too much.

    Args:
        segments: The segments of a file.
        size: Size of the file in bytes.
        where: Name of the field with the segments, for the error message.

    Raises:
        LimitError: The total size of distinct segments exceeds ``MAX_OVERLAP`` times the file.
    """
    total = sum({(segment.offset, segment.size): segment.size for segment in segments}.values())
    if total > MAX_OVERLAP * size:
        raise LimitError(
            f"found distinct segments of {total} bytes in a file of {size}, expected at most "
            f"{MAX_OVERLAP} times its size",
            field=where,
        )
