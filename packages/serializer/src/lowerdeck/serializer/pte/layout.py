"""Placement of the parts of a file: the choices that a reader must keep for a rewrite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import shown
from lowerdeck.serializer.flatbuffer.alignment import check_positive, check_power_of_two


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The choices a writer makes that do not change what the program means.

    Attributes:
        segment_alignment: Every segment starts at a multiple of this many bytes of the file.
        constant_tensor_alignment: Every constant does so within its segment; a power of two.
        delegate_alignment: Every inline delegate starts at such a multiple; a power of two.
        extract_delegate_segments: Whether delegates are segments, or in the FlatBuffer.
    """

    segment_alignment: int = 128
    constant_tensor_alignment: int = 16
    delegate_alignment: int = 16
    extract_delegate_segments: bool = True


def chosen_layout(file_layout: FileLayout | None, **options: int | bool | None) -> FileLayout:
    """Return the layout to write, from options and the layout of the file that was read.

    Args:
        file_layout: Layout of the source file, or None.
        options: Fields of the layout; None means that of the file, or else the default.

    Raises:
        ProgramError: An alignment is not possible.
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
