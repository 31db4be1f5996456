"""Vectors of scalars as the bytes that stand in the file: a count, then the elements."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from lowerdeck.serializer.errors import ProgramError


def _packer(code: str) -> Callable[[Sequence[int | float | bool]], bytes]:
    # Argument lists are short and of few lengths: a compiled struct for each saves a third.
    packs = [struct.Struct(f"<I{count}{code}").pack for count in range(24)]

    def pack(items: Sequence[int | float | bool]) -> bytes:
        count = len(items)
        try:
            if count < 24:
                return packs[count](count, *items)
            return struct.pack(f"<I{count}{code}", count, *items)
        except struct.error as error:
            raise ProgramError(f"found {_first_bad(code, items)}: {error}") from error

    return pack


def _first_bad(code: str, items: Sequence[object]) -> str:
    for item in items:
        try:
            struct.pack(code, item)
        except struct.error:
            return repr(item)
    return "a vector that is too long"


byte_vector = _packer("B")
bool_vector = _packer("?")
int_vector = _packer("i")
long_vector = _packer("q")
unsigned_long_vector = _packer("Q")
double_vector = _packer("d")
