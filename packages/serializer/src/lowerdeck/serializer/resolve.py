"""Segments brought back to where a logical program holds its bytes, as views and not copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm

from lowerdeck.serializer import schema
from lowerdeck.serializer.container import Container
from lowerdeck.serializer.decode import ProgramDecoder
from lowerdeck.serializer.enums import DataLocation, TensorDataLocation
from lowerdeck.serializer.errors import ContentError, IndexRangeError, SegmentError
from lowerdeck.serializer.infer import (
    SegmentAlignments,
    segment_alignments,
    tensor_alignment,
)
from lowerdeck.serializer.storage import same_bytes

_MAX_PADDING = 1 << 16


@dataclass(slots=True)
class DataUse:
    """How many bytes of each constant and initial value the tensors use, by index."""

    constants: dict[int, int] = field(default_factory=dict)
    mutable: dict[int, int] = field(default_factory=dict)

    def count(self, values: Iterable[schema.EValue]) -> None:
        """Take the tensors of one method into account."""
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
    """The bytes of one file by what they are."""

    def __init__(self, container: Container, decoder: ProgramDecoder) -> None:
        """Read the segment table.

        Raises:
            FormatError: A segment is malformed or leads outside the file.
        """
        self.container = container
        self.decoder = decoder
        self.segments: list[schema.DataSegment] = decoder.segments()
        for index, segment in enumerate(self.segments):
            container.check_segment(index, segment)

    @cached_property
    def alignments(self) -> SegmentAlignments:
        """Return what the places of the segments tell about alignments."""
        count = len(self.segments)
        named = [index for _, index in self.decoder.named_data() if index < count]
        base, size = self.container.segment_base, len(self.container.program)
        gaps = self._inner_gaps(named)
        return segment_alignments(base, size, self.segments, named, gaps)

    @cached_property
    def inline_delegates(self) -> list[tuple[int, memoryview]]:
        """Return the delegates in the FlatBuffer: where each starts, and its bytes."""
        return self.decoder.inline_delegates()

    def segment(self, index: int, where: str) -> memoryview:
        """Return the bytes of one segment.

        Raises:
            SegmentError: There is none of this index.
        """
        return self.container.segment(index, self.segments, where)

    def named_data(self) -> list[schema.NamedData]:
        """Return the named data with their bytes and alignments."""
        found = []
        for number, (key, index) in enumerate(self.decoder.named_data()):
            view = self.segment(index, f"Program.named_data[{number}].segment_index")
            found.append(schema.NamedData(key, view, self.alignments.own[index]))
        return found

    def constant_offsets(self) -> schema.SubsegmentOffsets | None:
        """Return where the constants start, or None in a legacy file.

        Raises:
            ContentError: The file has constants in both places.
        """
        offsets = self.decoder.constant_segment()
        if offsets is None or not offsets.offsets:
            return None
        if self.decoder.has_constant_buffer:
            raise ContentError(
                "found constants both inline and in a segment, which the runtime refuses",
                field="Program.constant_buffer",
            )
        return offsets

    def constants(self, use: Mapping[int, int]) -> list[schema.Buffer]:
        """Return the constants, with the reserved first one.

        Args:
            use: Bytes that tensors use, by index.
        """
        offsets = self.constant_offsets()
        if offsets is None:
            inline = self.decoder.constant_buffer()
            return [schema.Buffer(view) for view in inline] or [schema.Buffer(b"")]
        return self._subsegments(offsets, use, "Program.constant_segment", padded=True)

    def mutable_data(self, use: Mapping[int, int]) -> list[schema.Buffer]:
        """Return the initial values of mutable buffers, with the reserved first one.

        Raises:
            ContentError: The file has more than one segment of them.
        """
        entries = self.decoder.mutable_data_segments()
        if not entries:
            return [schema.Buffer(b"")]
        if len(entries) > 1:
            raise ContentError(
                f"found {len(entries)} entries, of which the runtime uses only the first",
                field="Program.mutable_data_segments",
            )
        return self._subsegments(entries[0], use, "Program.mutable_data_segments[0]", padded=False)

    def delegate_bytes(
        self, reference: schema.BackendDelegateDataReference, where: str
    ) -> memoryview:
        """Return the bytes of a delegate.

        Raises:
            FormatError: The reference leads nowhere.
        """
        if reference.location is DataLocation.SEGMENT:
            return self.segment(reference.index, where)
        inline = self.inline_delegates
        if reference.index >= len(inline):
            raise IndexRangeError(
                f"found index {reference.index}, expected one of {len(inline)} inline delegates",
                field=where,
            )
        return inline[reference.index][1]

    def _inner_gaps(self, named: Iterable[int]) -> dict[int, int]:
        """Return the zeros before each named blob that is a constant too: they may be padding."""
        table = self.decoder.constant_segment()
        if table is None or table.segment_index >= len(self.segments):
            return {}
        outer = self.segments[table.segment_index]
        whole = self.segment(table.segment_index, "Program.constant_segment.segment_index")
        gaps: dict[int, int] = {}
        for index in named:
            start = self.segments[index].offset - outer.offset
            if 0 < start < outer.size and index != table.segment_index:
                before = whole[max(0, start - _MAX_PADDING) : start].tobytes()
                gaps[self.segments[index].offset] = len(before) - len(before.rstrip(b"\0"))
        return gaps

    def _subsegments(
        self,
        table: schema.SubsegmentOffsets,
        use: Mapping[int, int],
        where: str,
        *,
        padded: bool,
    ) -> list[schema.Buffer]:
        buffers = [schema.Buffer(b"")]
        offsets = table.offsets
        if len(offsets) < 2:
            return buffers
        whole = self.segment(table.segment_index, f"{where}.segment_index")
        aliases = self._inner_segments(table.segment_index) if padded else {}
        alignment = tensor_alignment(self.container, offsets) if padded else 1
        starts = sorted(set(offsets[1:]))
        # Those that share a place share their bytes: the longest use counts for all.
        used_at = {offset: inner.size for offset, inner in aliases.items()}
        for index, offset in enumerate(offsets[1:], 1):
            if index in use:
                used_at[offset] = max(used_at.get(offset, 0), use[index])
        lengths: dict[int, int] = {}
        loose: dict[int, int] = {}
        for index, offset in enumerate(offsets[1:], 1):
            used = used_at.get(offset, 0)
            if offset + used > len(whole):
                raise SegmentError(
                    f"found {used} bytes from {offset} on in a segment of {len(whole)} bytes",
                    field=f"{where}.offsets[{index}]",
                )
            after = bisect_right(starts, offset)
            # Nothing is padded behind the last one.
            length, reach = len(whole) - offset, 1
            if after < len(starts) and starts[after] < len(whole):
                length = starts[after] - offset
                follower = aliases.get(starts[after])
                reach = lcm(alignment, follower.alignment) if follower else alignment
                tail = (
                    whole[offset + used : offset + length].tobytes()
                    if length - used < reach
                    else b"1"
                )
                if offset in used_at and not any(tail):
                    length = used
                elif length > used:
                    loose[offset] = max(used, length - reach + 1)
            lengths[offset] = max(length, used)
        _tell_apart(whole, lengths, loose)
        for offset in offsets[1:]:
            buffers.append(schema.Buffer(whole[offset : offset + lengths[offset]]))
        return buffers

    def _inner_segments(self, outer: int) -> dict[int, _InnerSegment]:
        """Return the segments that lie inside another, by their offset within it."""
        whole = self.segments[outer]
        found: dict[int, _InnerSegment] = {}
        for index, segment in enumerate(self.segments):
            start = segment.offset - whole.offset
            if index == outer or not segment.size or not 0 <= start <= whole.size - segment.size:
                continue
            alignment = lcm(self.alignments.shared, self.alignments.own[index])
            known = found.get(start)
            size = max(segment.size, known.size if known else 0)
            found[start] = _InnerSegment(size, alignment)
        return found


def _tell_apart(whole: memoryview, lengths: dict[int, int], loose: dict[int, int]) -> None:
    """Shorten what may be padding until no two contents are equal, for a writer would join them.

    Args:
        whole: The segment.
        lengths: Length of each content by its offset; changed in place.
        loose: For contents that nothing tells the length of, the least that they can have.
    """
    if not loose:
        return
    by_length: dict[int, list[int]] = {}
    for offset, length in lengths.items():
        if offset not in loose:
            by_length.setdefault(length, []).append(offset)
    for offset, least in loose.items():
        length = lengths[offset]
        view = whole[offset : offset + length]
        while (
            length > least
            and view[length - 1] == 0
            and any(
                same_bytes(view[:length], whole[other : other + length])
                for other in by_length.get(length, ())
            )
        ):
            length -= 1
        lengths[offset] = length
        by_length.setdefault(length, []).append(offset)


@dataclass(frozen=True, slots=True)
class _InnerSegment:
    size: int
    alignment: int
