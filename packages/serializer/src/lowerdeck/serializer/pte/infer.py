"""The layout of a file, inferred from the offsets of its parts.

The alignments that a writer was asked for are not stored. What can be inferred is a layout that
reproduces the offset of every part, and that a rewrite keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from lowerdeck.serializer.flatbuffer.alignment import lowest_bit
from lowerdeck.serializer.pte.container import Container
from lowerdeck.serializer.pte.header import HEADER_LENGTH, HEADER_START
from lowerdeck.serializer.pte.layout import FileLayout
from lowerdeck.serializer.pte.schema import DataSegment

_PAGE = 4096
"""Parts that all start at multiples of a page do so on purpose, and not by luck."""


@dataclass(frozen=True, slots=True)
class SegmentAlignments:
    """Alignments that explain the offsets of the segments.

    Attributes:
        shared: Alignment of all segments.
        own: For each segment what it was aligned to, at least 1.
    """

    shared: int
    own: tuple[int, ...]


def segment_alignments(
    base: int,
    program_size: int,
    segments: Sequence[DataSegment],
    named: Iterable[int],
    inner_padding: Mapping[int, int],
) -> SegmentAlignments:
    """Return alignments with which a writer would place the segments where they are.

    Args:
        base: Where the segments start, 0 if there are none.
        program_size: Where the FlatBuffer before them ends.
        named: Those that hold named data, the only ones with individual alignments.
        inner_padding: For those inside other segments the zeros before them, by their offset.
    """
    used = [segment for segment in segments if segment.size]
    if not base:
        return SegmentAlignments(FileLayout().segment_alignment, (1,) * len(segments))
    paddings = _paddings(used)
    common = gcd(base, *(segment.offset for segment in used))
    base_padding = base - program_size
    widest = max((base_padding, *paddings.values()))
    shared = _least(lowest_bit(common), widest)
    if widest >= shared:
        # No power of two explains it: what divides every offset is all that is known.
        shared = common
    own = [shared] * len(segments)
    for index, segment in enumerate(segments):
        padding = (
            inner_padding.get(segment.offset, paddings[segment.offset]) if segment.size else 0
        )
        if padding >= shared:
            own[index] = _explain(base, segment.offset, padding)
    if base_padding >= lcm(shared, *own):
        # A blob was aligned more strictly than its offset shows; this divides the offsets.
        shared = common
        for index in named:
            if segments[index].size:
                own[index] = gcd(base, segments[index].offset)
    return SegmentAlignments(shared, tuple(own))


def file_layout(
    container: Container,
    shared: int,
    constants: Sequence[int],
    inline: Sequence[int],
    *,
    extracted: bool,
) -> FileLayout:
    """Return a layout that a writer would need to give this file.

    Args:
        shared: Alignment of its segments.
        constants: Offsets of its constants.
        inline: Where the bytes of its inline delegates start.
        extracted: Whether delegates are segments.
    """
    inserted = _inserted(container)
    tensor = tensor_alignment(container, constants)
    limit = inserted or _PAGE
    # We align the end of the FlatBuffer as well: an alignment of both is not a coincidence.
    delegate = min(_common_bit((*inline, len(container.program))), limit)
    if delegate < FileLayout().delegate_alignment or not inline:
        delegate = min(_common_bit(inline), limit)
    if not inline and inserted <= HEADER_LENGTH:
        delegate = FileLayout().delegate_alignment
    return FileLayout(shared, tensor, delegate, extracted)


def tensor_alignment(container: Container, constants: Sequence[int]) -> int:
    """Return the alignment of the constants within their segment."""
    # The space for the header is a multiple of this alignment, so it bounds what luck can add.
    bound = _inserted(container) or FileLayout().constant_tensor_alignment
    return min(_common_bit((container.segment_base, *constants)), bound)


def _paddings(used: Sequence[DataSegment]) -> dict[int, int]:
    """Return for each start of a segment the unused bytes before it."""
    paddings: dict[int, int] = {}
    end = 0
    for segment in sorted(used, key=lambda segment: segment.offset):
        paddings.setdefault(segment.offset, max(segment.offset - end, 0))
        end = max(end, segment.offset + segment.size)
    return paddings


def _least(aligned: int, padding: int) -> int:
    """Return the least power of two that leaves ``padding`` bytes before a part.

    Args:
        aligned: The power of two at whose multiples the parts do start.
        padding: The widest unused run before one.
    """
    if aligned >= _PAGE:
        return min(aligned, max(_PAGE, 1 << padding.bit_length()))
    return min(aligned, max(FileLayout().segment_alignment, 1 << padding.bit_length()))


def _explain(base: int, offset: int, padding: int) -> int:
    """Return an alignment of one part that leaves ``padding`` bytes before it."""
    alignment = min(lowest_bit(base | offset), 1 << padding.bit_length())
    return alignment if alignment > padding else gcd(base, offset)


def _common_bit(positions: Sequence[int]) -> int:
    combined = 0
    for position in positions:
        combined |= position
    return lowest_bit(combined) if combined else 1 << 30


def _inserted(container: Container) -> int:
    """Return how many bytes were inserted for the extended header, inferred from its zeros."""
    if container.header is None:
        return 0
    inserted = HEADER_LENGTH
    while True:
        # Our FlatBuffers start right after the zeros, others with at most a few more.
        more = container.program[HEADER_START + inserted : HEADER_START + 2 * inserted].tobytes()
        if len(more) < inserted or more.count(0) < inserted:
            return inserted
        inserted *= 2
