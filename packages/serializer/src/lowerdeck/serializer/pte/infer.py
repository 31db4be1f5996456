"""Infer the layout of a file from the offsets of its parts.

Files do not store the alignments requested from the writer. The inferred layout reproduces the
offset of every part when the file is rewritten.
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
"""If all parts start at multiples of a page, this is taken as intended, not as chance."""


@dataclass(frozen=True, slots=True)
class SegmentAlignments:
    """Alignments that explain the offsets of the segments.

    Attributes:
        shared: Alignment of all segments.
        own: Alignment of each segment, at least 1.
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
    """Return alignments that reproduce the offsets of the segments.

    Args:
        base: Offset of the segments, 0 if there are none.
        program_size: End of the FlatBuffer before the segments.
        named: Segments with named data, the only ones with individual alignments.
        inner_padding: Zeros before each segment that is inside another, by offset.
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
        # No power of two explains the padding: use the common divisor of the offsets.
        shared = common
    own = [shared] * len(segments)
    for index, segment in enumerate(segments):
        padding = (
            inner_padding.get(segment.offset, paddings[segment.offset]) if segment.size else 0
        )
        if padding >= shared:
            own[index] = _explain(base, segment.offset, padding)
    if base_padding >= lcm(shared, *own):
        # A blob has a larger alignment than its offset shows; use divisors of the offsets.
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
    """Return a layout with which a writer reproduces the file.

    Args:
        shared: Alignment of the segments.
        constants: Offsets of the constants.
        inline: Offsets of the inline delegates' bytes.
        extracted: Whether delegates are segments.
    """
    inserted = _inserted(container)
    tensor = tensor_alignment(container, constants)
    limit = inserted or _PAGE
    # Our writer also aligns the end of the FlatBuffer: an alignment of both is no coincidence.
    delegate = min(_common_bit((*inline, len(container.program))), limit)
    if delegate < FileLayout().delegate_alignment or not inline:
        delegate = min(_common_bit(inline), limit)
    if not inline and inserted <= HEADER_LENGTH:
        delegate = FileLayout().delegate_alignment
    return FileLayout(shared, tensor, delegate, extracted)


def tensor_alignment(container: Container, constants: Sequence[int]) -> int:
    """Return the alignment of the constants within their segment."""
    # The space for the header is a multiple of this alignment, which bounds alignment by chance.
    bound = _inserted(container) or FileLayout().constant_tensor_alignment
    return min(_common_bit((container.segment_base, *constants)), bound)


def _paddings(used: Sequence[DataSegment]) -> dict[int, int]:
    """Return the unused bytes before each segment, by its offset."""
    paddings: dict[int, int] = {}
    end = 0
    for segment in sorted(used, key=lambda segment: segment.offset):
        paddings.setdefault(segment.offset, max(segment.offset - end, 0))
        end = max(end, segment.offset + segment.size)
    return paddings


def _least(aligned: int, padding: int) -> int:
    """Return the least power-of-two alignment that explains ``padding`` bytes before a part.

    Args:
        aligned: Largest power of two that divides all offsets.
        padding: Largest padding before a part.
    """
    if aligned >= _PAGE:
        return min(aligned, max(_PAGE, 1 << padding.bit_length()))
    return min(aligned, max(FileLayout().segment_alignment, 1 << padding.bit_length()))


def _explain(base: int, offset: int, padding: int) -> int:
    """Return an alignment that explains ``padding`` bytes before a part."""
    alignment = min(lowest_bit(base | offset), 1 << padding.bit_length())
    return alignment if alignment > padding else gcd(base, offset)


def _common_bit(positions: Sequence[int]) -> int:
    combined = 0
    for position in positions:
        combined |= position
    return lowest_bit(combined) if combined else 1 << 30


def _inserted(container: Container) -> int:
    """Return the bytes inserted for the extended header, inferred from the zeros after it."""
    if container.header is None:
        return 0
    inserted = HEADER_LENGTH
    while True:
        # Our FlatBuffers start right after the zeros; others have at most a few more.
        more = container.program[HEADER_START + inserted : HEADER_START + 2 * inserted].tobytes()
        if len(more) < inserted or more.count(0) < inserted:
            return inserted
        inserted *= 2
