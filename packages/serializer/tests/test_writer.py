"""FlatBuffers that are written of nested dictionaries, read by the rules of the format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck import serializer as pte
from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.flatbuffer.wire import SCALAR_SIZES, Format, parse_fields
from lowerdeck.serializer.flatbuffer.writer import Writer
from lowerdeck_files.payloads import convolution, linear, payload, relu
from lowerdeck_files.programs import BUNDLE, programs

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


class LibraryReader:
    """Compares tables with what was written, read by the ``flatbuffers`` library alone."""

    def __init__(self, library: Any, form: Format, data: bytes) -> None:
        self.library, self.form, self.data = library, form, data
        types = library.number_types
        self.numbers = {
            **{f"u{8 * width}": getattr(types, f"Uint{8 * width}Flags") for width in (1, 2, 4, 8)},
            **{f"i{8 * width}": getattr(types, f"Int{8 * width}Flags") for width in (1, 2, 4, 8)},
            "f32": types.Float32Flags,
            "f64": types.Float64Flags,
            "bool": types.BoolFlags,
        }

    def compare_root(self, name: str, root: Any, prefix: int) -> None:
        self.compare(
            name,
            root,
            prefix + self.library.encode.Get(self.library.packer.uoffset, self.data, prefix),
        )

    def compare(self, name: str, item: Any, position: int) -> None:
        table = self.library.table.Table(self.data, position)
        fields = self.form.tables[name]
        for number, field in enumerate(fields):
            slot = table.Offset(4 + 2 * number)
            if field.of in self.form.unions and not field.is_offset:
                kind = table.Get(self.numbers["u8"], position + slot) if slot else 0
                continue
            missing = None if field.is_offset else 0
            value = (
                item.get(field.name, missing)
                if isinstance(item, dict)
                else getattr(item, field.name)
            )
            if not field.is_offset:
                found = (
                    table.Get(self.numbers[field.kind], position + slot)
                    if slot
                    else (field.default)
                )
                assert found == value, (name, field.name)
            elif value is None:
                assert not slot, (name, field.name)
            elif field.kind == "union":
                if field.of in self.form.unions:
                    of, inner = self.form.unions[field.of][kind], value
                else:
                    of, inner = value
                self.compare(of, inner, table.Indirect(position + slot))
            else:
                self.compare_offset(table, field, value, position + slot)

    def compare_offset(self, table: Any, field: Any, value: Any, at: int) -> None:
        if field.kind == "str":
            assert table.String(at) == value.encode()
            return
        if field.kind not in ("bytes",) and not field.item:
            self.compare(field.kind, value, table.Indirect(at))
            return
        start, count = table.Vector(at - table.Pos), table.VectorLen(at - table.Pos)
        if field.kind == "bytes":
            assert self.data[start : start + count] == bytes(value)
            return
        assert count == len(value)
        width = SCALAR_SIZES.get(field.item, 4)
        for number, entry in enumerate(value):
            place = start + number * width
            if field.item in SCALAR_SIZES:
                assert table.Get(self.numbers[field.item], place) == entry
            elif field.item == "str":
                assert table.String(place) == entry.encode()
            else:
                self.compare(field.item, entry, table.Indirect(place))


def check_with_library(write: Callable[[], object]) -> set[Format]:
    """Compare every FlatBuffer that a call writes with what the library reads of it."""
    library = pytest.importorskip("flatbuffers")
    written: list[tuple[Format, str, Any, int, bytes]] = []
    finish = Writer.finish

    def recorded(self: Writer, name: str, root: Any, *args: Any, **kwargs: Any) -> Any:
        pieces = finish(self, name, root, *args, **kwargs)
        data = b"".join(map(bytes, pieces))
        written.append((self._form, name, root, kwargs.get("prefix", 0), data))
        return pieces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "finish", recorded)
        write()
    for form, name, root, prefix, data in written:
        LibraryReader(library, form, data).compare_root(name, root, prefix)
    return {form for form, *_ in written}


@settings(deadline=None, max_examples=40)
@given(programs(partial=False), st.booleans())
def test_the_formats_own_library_reads_programs(program: pte.Program, extracted: bool) -> None:
    assert check_with_library(
        lambda: pte.serialize_pte(program, extract_delegate_segments=extracted)
    )


def test_the_formats_own_library_reads_the_other_formats() -> None:
    layout = pte.TensorLayout(pte.ScalarType.FLOAT, [2], [0])
    entries = {"w": pte.ExternalEntry(b"12345678", layout), "b": pte.ExternalEntry(b"1")}

    def write() -> None:
        pte.serialize_bundle(BUNDLE)
        pte.serialize_ptd(entries)
        for graph in (relu(), convolution(), linear()):
            pte.encode_payload(pte.decode_payload(payload(graph, bytes(64))))

    assert len(check_with_library(write)) == 3
