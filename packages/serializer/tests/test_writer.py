"""FlatBuffers that are written of nested dictionaries, read by the rules of the format."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.flatbuffer.wire import Format, parse_fields
from lowerdeck.serializer.flatbuffer.writer import Writer

TABLES = {
    "Root": parse_fields("unused:u32 inner:[Inner] kind:u8 any:union numbers:[u32] alone:Inner"),
    "Inner": parse_fields("wide:u64 small:u8 name:str short:i16 real:f32"),
}


def write(values: dict[str, Any]) -> bytes:
    return b"".join(Writer(Format(TABLES)).finish("Root", values, b"TEST"))


def reader(data: bytes) -> tuple[TableReader, int]:
    return TableReader(memoryview(data), TABLES, strict=True), root_position(memoryview(data))


def test_fields_are_aligned_and_zeros_left_out() -> None:
    inner = [{"wide": at, "small": 7, "name": "key", "real": 0.5} for at in (0, 1 << 40)]
    data = write({"inner": inner, "numbers": ()})
    assert data[4:8] == b"TEST"
    tables, root = reader(data)
    unused, vector, kind, union, numbers, alone = tables.fields("Root", root)
    assert (unused, kind, union, alone) == (0, 0, 0, 0)
    assert tables.scalars(numbers, "u32", "") == []
    found = [tables.fields("Inner", at) for at in tables.tables(vector, "")]
    assert [(one[0], *one[3:]) for one in found] == [(0, 0, 0.5), (1 << 40, 0, 0.5)]
    assert {tables.string(one[2], "") for one in found} == {"key"}


def test_equal_tables_are_written_once_and_others_share_their_description() -> None:
    def size(inner: list[dict[str, Any]]) -> int:
        return len(write({"inner": inner}))

    one = {"small": 1, "real": 2.0}
    assert size([one] * 101) - size([one]) == 100 * 4
    others = [{"small": 1, "real": float(number + 3)} for number in range(100)]
    assert size([one, *others]) - size([one]) == 100 * (4 + 12)


def test_it_is_what_the_formats_own_library_reads() -> None:
    library = pytest.importorskip("flatbuffers")
    values = {"kind": 3, "any": ("Inner", {"short": -4}), "numbers": [5, 6]}
    data = write(values)
    table = library.table.Table(data, library.encode.Get(library.packer.uoffset, data, 0))
    types = library.number_types
    assert table.Get(types.Uint8Flags, table.Pos + table.Offset(8)) == 3
    inner = library.table.Table(data, table.Indirect(table.Pos + table.Offset(10)))
    assert inner.Get(types.Int16Flags, inner.Pos + inner.Offset(10)) == -4
    vector = table.Offset(12)
    assert table.VectorLen(vector) == 2
    assert table.Get(types.Uint32Flags, table.Vector(vector) + 4) == 6
    assert struct.unpack_from("<4x4s", data) == (b"TEST",)
