"""A FlatBuffer that grows from its end, as offsets lead forward and children are known first.

FlatBuffers' own builder writes each field by a call or two, which was a quarter of what lowering a
transformer took; here a table is packed at once, and its layout is found once for all alike.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

_ALIGNMENT = 16
# After the 4 bytes that lead to the vtable: what needs no gap, then 8 bytes wide, then the small.
_ORDER = {4: 0, 8: 1, 2: 2, 1: 3}


class FlatBuffer:
    """The bytes of a FlatBuffer, the last ones first.

    A *reference* says how many bytes before the end something begins; 0 is none.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._vtables: dict[bytes, int] = {}

    def table(self, codes: str, *values: Any) -> int:  # as struct.pack has them
        """Add a table and return a reference to it.

        Args:
            codes: A code of :mod:`struct` for each field, O for a reference, x for one unused.
            values: The fields; what is 0 is left out, which readers take for 0.
        """
        layout, order, offsets, alignment, vtable = _layout(codes, tuple(map(bool, values)))
        described = self._vtables.get(vtable)
        if described is None:
            described = self._vtables[vtable] = self._add(vtable, 4)
        start = self._start(layout.size, alignment)
        fields = (
            start - offset - values[at] if codes[at] == "O" else values[at]
            for at, offset in zip(order, offsets, strict=True)
        )
        return self._add(layout.pack(described - start, *fields), alignment)

    def numbers(self, numbers: Sequence[int]) -> int:
        """Add a vector of unsigned 32-bit numbers and return a reference to it."""
        return self._add(struct.pack(f"<{1 + len(numbers)}I", len(numbers), *numbers), 4)

    def references(self, references: Sequence[int]) -> int:
        """Add a vector of what was added before and return a reference to it."""
        first = self._start(4 + 4 * len(references), 4) - 4
        return self.numbers([first - 4 * at - one for at, one in enumerate(references)])

    def string(self, text: str) -> int:
        """Add a string and return a reference to it."""
        raw = text.encode()
        padded = raw.ljust(len(raw) // 4 * 4 + 4, b"\0")
        return self._add(struct.pack("<I", len(raw)) + padded, 4)

    def finish(self, root: int, identifier: bytes) -> bytes:
        """Return all bytes.

        Args:
            root: The outermost table.
            identifier: Four bytes that say what the buffer is.
        """
        start = self._start(8, _ALIGNMENT)
        self._add(struct.pack("<I4s", start - root, identifier), _ALIGNMENT)
        return b"".join(reversed(self._pieces))

    def _start(self, size: int, alignment: int) -> int:
        """Return where something of ``size`` bytes will begin."""
        return -(-(self._size + size) // alignment) * alignment

    def _add(self, piece: bytes, alignment: int) -> int:
        start = self._start(len(piece), alignment)
        gap = start - self._size - len(piece)
        if gap:
            self._pieces.append(b"\0" * gap)
        self._pieces.append(piece)
        self._size = start
        return start


@cache
def _layout(
    codes: str, present: tuple[bool, ...]
) -> tuple[struct.Struct, list[int], list[int], int, bytes]:
    """Return how a table is packed: its fields' order, offsets and alignment; and its vtable."""
    sizes = [struct.calcsize("I" if code == "O" else code) for code in codes]
    shown = [at for at, given in enumerate(present) if given]
    shown.sort(key=lambda at: _ORDER[sizes[at]])
    entries = [0] * (max(shown, default=-1) + 1)
    layout, end = "<i", 4
    for at in shown:
        gap = -end % sizes[at]
        layout += "x" * gap + codes[at].replace("O", "I")
        entries[at] = end + gap
        end += gap + sizes[at]
    layout += "x" * (-end % 4)
    packed = struct.Struct(layout)
    vtable = struct.pack(f"<{2 + len(entries)}H", 4 + 2 * len(entries), packed.size, *entries)
    wide = any(sizes[at] == 8 for at in shown)
    offsets = [entries[at] for at in shown]
    return packed, shown, offsets, 8 if wide else 4, vtable.ljust(-(-len(vtable) // 4) * 4, b"\0")
