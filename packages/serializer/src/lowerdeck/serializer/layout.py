"""How the parts of a file are placed: the choices that a reader must keep for a rewrite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The choices a writer makes that do not change what the program means.

    Attributes:
        segment_alignment: Every segment starts at a multiple of this many bytes of the file.
        constant_tensor_alignment: Every constant does so within its segment; a power of two.
        delegate_alignment: Every inline delegate starts at such a multiple; a power of two.
        extract_delegate_segments: Whether delegates are segments, or stand in the FlatBuffer.
    """

    segment_alignment: int = 128
    constant_tensor_alignment: int = 16
    delegate_alignment: int = 16
    extract_delegate_segments: bool = True
