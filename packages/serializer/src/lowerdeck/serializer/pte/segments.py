"""Placement of blobs after the FlatBuffer; equal blobs are stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from lowerdeck.serializer.flatbuffer.alignment import common_alignment, round_up
from lowerdeck.serializer.flatbuffer.blobs import BlobIndex
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.stream import Piece
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.schema import Buffer, DataSegment, SubsegmentOffsets


class NamedBlob(NamedTuple):
    """One key with its bytes and requested alignment."""

    key: str
    view: memoryview
    alignment: int


@dataclass(slots=True)
class SegmentPlan:
    """All segments of one file, with their bytes.

    Attributes:
        segments: The ranges, relative to the segment base.
        pieces: Contents as ``(offset, bytes)`` in ascending order, relative to the base.
        constants: Offsets of the constants, None until they are placed.
        mutable: Offsets of the initial values, or None when there are none.
        delegates: Segment of each extracted delegate, by index in ``backend_delegate_data``.
        named: Keys with their segments.
        base_alignment: Required alignment of the segment base.
        end: End of the last segment, relative to the base.
    """

    segments: list[DataSegment] = field(default_factory=list)
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)
    constants: SubsegmentOffsets | None = None
    mutable: SubsegmentOffsets | None = None
    delegates: dict[int, int] = field(default_factory=dict)
    named: list[tuple[str, int]] = field(default_factory=list)
    base_alignment: int = 1
    end: int = 0

    def stream(self, before: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces before the segments, then those of the segments with their padding.

        Args:
            before: All bytes of the file up to the segment base.
        """
        yield from before
        end = 0
        for offset, view in self.pieces:
            if offset > end:
                yield bytes(offset - end)
            yield view
            end = offset + len(view)


class SegmentPlanner:
    """Assigns offsets to blobs, one after the other."""

    def __init__(self, layout: FileLayout, named: Sequence[NamedBlob]) -> None:
        """Create a planner.

        Args:
            layout: The alignments to keep.
            named: The named blobs; an equal constant or delegate gets their alignment, so that the
                bytes are stored once.
        """
        self.plan: SegmentPlan = SegmentPlan(base_alignment=layout.segment_alignment)
        self._layout = layout
        self._segments: BlobIndex[int] = BlobIndex()
        self._constants: BlobIndex[int] = BlobIndex()
        self._named_alignments: BlobIndex[list[int]] = BlobIndex()
        for blob in named:
            alignment = self._named_alignments.find(blob.view)
            if alignment is None:
                self._named_alignments.add(blob.view, [blob.alignment])
            else:
                alignment[0] = common_alignment(alignment[0], blob.alignment)

    def add_constants(self, buffers: Sequence[Buffer]) -> None:
        """Place all constants in one segment; entry 0 is reserved."""
        tensor_alignment = self._layout.constant_tensor_alignment
        start, offset = self._next_start(tensor_alignment), 0
        offsets = [0]
        views = _views(buffers, "constant_buffer")[1:]
        if views and not any(len(view) for view in views):
            # The runtime treats an empty segment as missing and fails to load.
            views[0] = memoryview(b"\0")
        for view in views:
            # An empty constant may have any offset inside the segment.
            place = self._constants.find(view) if len(view) else 0
            if place is None:
                named_alignment = self._named_alignments.find(view)
                alignment = tensor_alignment
                if named_alignment is not None:
                    alignment = lcm(alignment, self._segment_alignment(named_alignment[0]))
                place = round_up(offset, alignment)
                self._constants.add(view, place)
                self.plan.pieces.append((start + place, view))
                offset = place + len(view)
            offsets.append(place)
        self.plan.constants = SubsegmentOffsets(self._close(start, start + offset), offsets)

    def add_mutable(self, buffers: Sequence[Buffer]) -> None:
        """Place the initial values in one segment, unaligned, because the runtime copies them."""
        views = _views(buffers, "mutable_data")[1:]
        if not views:
            return
        start = end = self._next_start(1)
        seen: BlobIndex[int] = BlobIndex()
        offsets = [0]
        for view in views:
            place = seen.find(view) if len(view) else 0
            if place is None:
                place = end - start
                seen.add(view, place)
                self.plan.pieces.append((end, view))
                end += len(view)
            offsets.append(place)
        if end == start:
            self.plan.pieces.append((start, memoryview(b"\0")))
            end += 1
        self.plan.mutable = SubsegmentOffsets(self._close(start, end), offsets)

    def add_delegate(self, index: int, view: memoryview) -> None:
        """Place the bytes of one delegate, or reuse an equal segment."""
        self.plan.delegates[index] = self._add(view)

    def add_named(self, blob: NamedBlob) -> None:
        """Place the bytes of one key, or reuse an equal segment or constant."""
        self.plan.named.append((blob.key, self._add(blob.view)))

    def _add(self, view: memoryview) -> int:
        number = self._segments.find(view)
        if number is not None:
            return number
        named_alignment = self._named_alignments.find(view)
        # Only constants equal to a named blob have the alignment of a segment.
        inside = self._constants.find(view) if named_alignment and len(view) else None
        if inside is not None and self.plan.constants is not None:
            whole = self.plan.segments[self.plan.constants.segment_index]
            start = whole.offset + inside
        else:
            alignment = named_alignment[0] if named_alignment else 1
            start = self._next_start(alignment) if len(view) else 0
            if len(view):
                self.plan.pieces.append((start, view))
        number = self._close(start, start + len(view))
        self._segments.add(view, number)
        return number

    def _segment_alignment(self, own: int) -> int:
        alignment = lcm(self._layout.segment_alignment, own)
        self.plan.base_alignment = common_alignment(self.plan.base_alignment, alignment)
        return alignment

    def _next_start(self, own: int) -> int:
        return round_up(self.plan.end, self._segment_alignment(own))

    def _close(self, start: int, end: int) -> int:
        self.plan.segments.append(DataSegment(start, end - start))
        self.plan.end = max(self.plan.end, end)
        return len(self.plan.segments) - 1


def _views(buffers: Sequence[Buffer], name: str) -> list[memoryview]:
    return [byte_view(buffer.storage, f"{name}[{index}]") for index, buffer in enumerate(buffers)]
