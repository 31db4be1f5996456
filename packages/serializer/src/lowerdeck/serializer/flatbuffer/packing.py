"""Vectors of scalars as the bytes that are in the file: a count, then the elements."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lowerdeck.serializer.errors import ProgramError

Packer: TypeAlias = Callable[[Sequence[int | float | bool]], bytes]


def _packer(code: str) -> Packer:
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


byte_vector: Packer = _packer("B")
bool_vector: Packer = _packer("?")
int_vector: Packer = _packer("i")
long_vector: Packer = _packer("q")
double_vector: Packer = _packer("d")
