"""Layout options of a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import shown
from lowerdeck.serializer.flatbuffer.alignment import (
    check_positive,
    check_power_of_two,
    lowest_bit,
)

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Writer options that do not change the meaning of the program.

    Attributes:
        segment_alignment: Alignment of segments in the file, in bytes.
        constant_tensor_alignment: Alignment of constants in their segment; a power of two.
        delegate_alignment: Alignment of inline delegates in the file; a power of two.
        extract_delegate_segments: Whether delegates are segments; otherwise they are inline in the
            FlatBuffer.
    """

    segment_alignment: int = 128
    constant_tensor_alignment: int = 16
    delegate_alignment: int = 16
    extract_delegate_segments: bool = True


class LayoutOptions(TypedDict, total=False):
    """Fields of :class:`FileLayout`; None or absent means the value of the source file."""

    segment_alignment: int | None
    constant_tensor_alignment: int | None
    delegate_alignment: int | None
    extract_delegate_segments: bool | None


def segment_alignment(starts: Iterable[int]) -> int:
    """Return an alignment of segments that reproduces their offsets when a file is rewritten.

    Files do not store the alignment. The result is the largest power of two, up to a page, that
    divides all offsets.

    Args:
        starts: Offset of the segment base in the file, and of each segment from the base.
    """
    combined = 0
    for start in starts:
        combined |= start
    return min(lowest_bit(combined), _PAGE) if combined else FileLayout().segment_alignment


def chosen_layout(file_layout: FileLayout | None, options: LayoutOptions) -> FileLayout:
    """Return the layout to write, from options and the layout of the source file.

    Args:
        file_layout: Layout of the source file, or None.
        options: Fields of the layout; None means the value of the source file, else the default.

    Raises:
        ProgramError: An option is invalid.
    """
    if not isinstance(file_layout, FileLayout | None):
        raise ProgramError(f"layout: found a {type(file_layout).__name__}, expected a FileLayout")
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    layout = replace(file_layout or FileLayout(), **chosen)
    check_positive(layout.segment_alignment, "segment_alignment")
    check_power_of_two(layout.constant_tensor_alignment, "constant_tensor_alignment")
    check_power_of_two(layout.delegate_alignment, "delegate_alignment")
    extracted: object = layout.extract_delegate_segments
    if not isinstance(extracted, bool):
        raise ProgramError(
            f"extract_delegate_segments: found {shown(extracted)}, expected True or False"
        )
    return layout
