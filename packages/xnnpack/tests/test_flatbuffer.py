"""FlatBuffers that payloads are written as, read by the rules of the format."""

from __future__ import annotations

import struct

import pytest

from lowerdeck.xnnpack.payload.flatbuffer import FlatBuffer


def fields_of(data: bytes, table: int, count: int) -> list[int]:
    """Return where each field of a table lies, 0 where it is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size, _, *entries = struct.unpack_from(f"<{data[vtable] // 2}H", data, vtable)
    assert size == 2 * len(entries) + 4
    return [table + entry if entry else 0 for entry in (*entries, *[0] * count)[:count]]


def followed(data: bytes, position: int) -> int:
    """Return where an offset leads."""
    return position + int(struct.unpack_from("<I", data, position)[0])


def test_fields_are_aligned_and_zeros_left_out() -> None:
    made = FlatBuffer()
    key = made.string("key")
    inner = [made.table("QBOhf", at, 7, key, 0, 0.5) for at in (0, 1 << 40)]
    data = made.finish(made.table("xO", 0, made.references(inner)), b"TEST")
    assert data[4:8] == b"TEST"
    nothing, vector = fields_of(data, followed(data, 0), 2)
    assert nothing == 0
    start = followed(data, vector)
    assert struct.unpack_from("<I", data, start) == (2,)
    zero, wide = (fields_of(data, followed(data, start + 4 + 4 * at), 5) for at in range(2))
    assert zero[0] == wide[3] == 0
    assert wide[0] % 8 == 0
    assert struct.unpack_from("<Q", data, wide[0]) == (1 << 40,)
    assert data[wide[1]] == 7
    assert struct.unpack_from("<f", data, zero[4]) == (0.5,)
    text = followed(data, wide[2])
    assert data[text : text + 8] == struct.pack("<I", 3) + b"key\0"


def test_tables_alike_share_their_description() -> None:
    one, many = FlatBuffer(), FlatBuffer()
    sizes = []
    for made, count in ((one, 1), (many, 101)):
        tables = [made.table("II", 1, 2) for _ in range(count)]
        sizes.append(len(made.finish(made.references(tables), b"TEST")))
    assert sizes[1] - sizes[0] == 100 * (4 + 12)


def test_it_is_what_the_formats_own_library_reads() -> None:
    library = pytest.importorskip("flatbuffers")
    made = FlatBuffer()
    data = made.finish(made.table("QIO", 3, 4, made.numbers([5, 6])), b"TEST")
    table = library.table.Table(data, library.encode.Get(library.packer.uoffset, data, 0))
    types = library.number_types
    assert table.Get(types.Uint64Flags, table.Pos + table.Offset(4)) == 3
    assert table.Get(types.Uint32Flags, table.Pos + table.Offset(6)) == 4
    vector = table.Offset(8)
    assert table.VectorLen(vector) == 2
    assert table.Get(types.Uint32Flags, table.Vector(vector) + 4) == 6
