"""How the parts of a file are placed: the choices that a reader must keep for a rewrite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import shown
from lowerdeck.serializer.flatbuffer.alignment import check_positive, check_power_of_two

T = TypeVar("T")


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


def chosen_layout(
    known: FileLayout | None,
    segment_alignment: int | None,
    constant_tensor_alignment: int | None,
    delegate_alignment: int | None,
    extract_delegate_segments: bool | None,
) -> FileLayout:
    """Return the layout that a writer was asked for.

    Args:
        known: Layout of the file that the program was read from, if any.
        segment_alignment: None means the known one, or else the default; so do the others.
        constant_tensor_alignment: A power of two.
        delegate_alignment: A power of two.
        extract_delegate_segments: Whether delegates become segments.

    Raises:
        ProgramError: An alignment is not possible.
    """
    if not isinstance(known, FileLayout | None):
        raise ProgramError(f"layout: found a {type(known).__name__}, expected a FileLayout")
    known = known or FileLayout()
    layout = FileLayout(
        _first(segment_alignment, known.segment_alignment),
        _first(constant_tensor_alignment, known.constant_tensor_alignment),
        _first(delegate_alignment, known.delegate_alignment),
        _first(extract_delegate_segments, known.extract_delegate_segments),
    )
    check_positive(layout.segment_alignment, "segment_alignment")
    check_power_of_two(layout.constant_tensor_alignment, "constant_tensor_alignment")
    check_power_of_two(layout.delegate_alignment, "delegate_alignment")
    if not isinstance(layout.extract_delegate_segments, bool):
        raise ProgramError(
            f"extract_delegate_segments: found {shown(layout.extract_delegate_segments)}, "
            "expected True or False"
        )
    return layout


def _first(asked: T | None, known: T) -> T:
    return known if asked is None else asked
