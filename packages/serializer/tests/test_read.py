"""Forms of files that we do not write, and the file that is decoded part by part."""

from __future__ import annotations

import gc
import mmap
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck.serializer.flatbuffer.writer import Writer
from lowerdeck.serializer.pte.schema import PROGRAM_FORMAT
from lowerdeck_files.programs import add_delegates, add_program, tensor

WEIGHT = bytes(range(24))


def _rich_program() -> pte.Program:
    program: pte.Program = add_delegates(
        add_program(), b"delegate blob", specs=[("speed", b"fast")]
    )
    program.named_data.append(pte.NamedData("key", b"named", 32))
    return program


def test_an_open_file_hands_out_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    pte.write_pte(_rich_program(), path)
    with pte.open_pte(path) as file:
        assert file.method_names == ("forward",)
        assert file.method("forward") == _rich_program().execution_plan[0]
        (delegate,) = file.delegates
        assert (delegate.method, delegate.id) == ("forward", "Backend")
        assert delegate.location is pte.DataLocation.SEGMENT
        assert bytes(delegate.data) == b"delegate blob"
        assert delegate.compile_specs == [pte.CompileSpec("speed", b"fast")]
        assert file.constants[1] == pte.Buffer(WEIGHT)
        assert [(entry.key, entry.data) for entry in file.named_data] == [("key", b"named")]
        assert bytes(file.segment(file.named_data_segments[0])) == b"named"
        assert file.program() == pte.deserialize_pte(path.read_bytes())
        with pytest.raises(KeyError, match="the file has forward"):
            file.method("backward")


def test_buffers_are_views_which_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    pte.write_pte(_rich_program(), path)
    with pte.open_pte(path) as file:
        view: Any = file.constants[1].storage
    assert view == WEIGHT
    data = bytearray(path.read_bytes())
    program = pte.deserialize_pte(data)
    data[data.index(WEIGHT)] = 99
    view = program.constant_buffer[1].storage
    assert view[0] == 99
    with path.open("rb") as raw:
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    assert pte.deserialize_pte(mapped) == pte.deserialize_pte(path.read_bytes())


def test_opening_decodes_nothing_of_the_methods(tmp_path: Path) -> None:
    program = add_program()
    plan = program.execution_plan[0]
    plan.values += [type(value)(value.val) for value in plan.values * 5000]
    path = tmp_path / "model.pte"
    pte.write_pte(program, path)
    tracemalloc.start()
    with pte.open_pte(path) as file:
        assert file.method_names == ("forward",)
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize(("size", "error"), [(0, pte.TruncatedError), (50, pte.FormatError)])
def test_a_short_file_is_refused_on_opening(
    size: int, error: type[pte.FormatError], tmp_path: Path
) -> None:
    path = tmp_path / "short.pte"
    path.write_bytes(pte.serialize_pte(add_program())[:size])
    with pytest.raises(error):
        pte.open_pte(path)


@pytest.mark.parametrize(
    ("length", "old"), [(24, True), (48, False)], ids=["old header", "longer header"]
)
def test_other_headers_and_bytes_behind_are_read(length: int, old: bool) -> None:
    whole = pte.serialize_pte(_rich_program(), delegate_alignment=64)
    data = bytearray(whole + b"left over")
    data[12:16] = struct.pack("<I", length)
    if old:
        data[32:40] = bytes(8)
        assert pte.PteFile(data).header.segment_data_size == 0  # type: ignore[union-attr]
    assert pte.verify_pte(data) == pte.deserialize_pte(whole)
    data[8:12] = b"EH00"
    with pytest.raises(pte.SegmentError, match="no extended header"):
        pte.deserialize_pte(data)


@pytest.mark.parametrize(
    ("position", "packed", "error", "field"),
    [
        (4, b"ET99", pte.MagicError, "file identifier"),
        (12, struct.pack("<I", 23), pte.OffsetError, "header.length"),
        (16, struct.pack("<Q", 8), pte.OffsetError, "header.program_size"),
        (16, struct.pack("<Q", 2**63), pte.TruncatedError, "header.program_size"),
        (24, struct.pack("<Q", 64), pte.OffsetError, "header.segment_base_offset"),
        (32, struct.pack("<Q", 2**64 - 1), pte.TruncatedError, "header.segment_data_size"),
    ],
)
def test_what_is_wrong_with_a_header_is_told(
    position: int, packed: bytes, error: type[pte.FormatError], field: str
) -> None:
    data = bytearray(pte.serialize_pte(_rich_program()))
    data[position : position + len(packed)] = packed
    with pytest.raises(error) as caught:
        pte.deserialize_pte(data)
    assert caught.value.field == field
    assert caught.value.offset == position


def test_inline_constants_of_legacy_files_are_read() -> None:
    data = _legacy_file([b"", WEIGHT, b"more"])
    found = pte.deserialize_pte(data)
    stored: list[Any] = [buffer.storage for buffer in found.constant_buffer]
    assert [bytes(each) for each in stored] == [b"", WEIGHT, b"more"]
    written = pte.serialize_pte(found)
    assert pte.PteFile(written).constant_segment is not None
    assert written.count(WEIGHT) == 1


def _legacy_file(constants: list[bytes]) -> bytes:
    """Return a program without methods, whose constants are in the FlatBuffer."""
    root = {"execution_plan": [], "constant_buffer": [pte.Buffer(data) for data in constants]}
    return b"".join(Writer(PROGRAM_FORMAT).finish("Program", root, b"ET12"))


def test_a_path_in_place_of_bytes_is_refused_with_what_to_call(tmp_path: Path) -> None:
    for path in ("model.pte", tmp_path / "model.pte"):
        for read in (pte.deserialize_pte, pte.verify_pte):
            with pytest.raises(pte.ProgramError, match=r"model\.pte', expected bytes.*open_pte"):
                read(path)  # type: ignore[arg-type]


def test_a_file_says_its_size_and_that_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    size = pte.write_pte(add_program(), path)
    with pte.open_pte(path) as file:
        assert repr(file) == f"<PteFile {size} bytes>"
        with pytest.raises(AttributeError, match="no attribute 'metod'"):
            file.metod  # noqa: B018
    assert repr(file) == "<PteFile closed>"
    with pytest.raises(ValueError, match="the file is closed"):
        file.method("forward")


def test_an_open_file_can_be_looked_at_for_ever() -> None:
    data = pte.serialize_pte(add_program())
    with pte.PteFile(data) as file:
        looks = [
            name for name in dir(pte.PteFile) if isinstance(getattr(pte.PteFile, name), property)
        ]
        for _ in range(3000):
            for name in looks:
                getattr(file, name)
            file.method("forward")


def test_a_tensor_of_too_many_dimensions_is_refused() -> None:
    program = add_program()
    program.execution_plan[0].values.append(tensor(range(201, 217)))
    data = pte.serialize_pte(program)
    sizes = struct.pack("<2i", 201, 202)
    assert data.count(struct.pack("<I", 16) + sizes) == 1
    data = data.replace(struct.pack("<I", 16) + sizes, struct.pack("<I", 17) + sizes)
    with pytest.raises(pte.LimitError, match="17 dimensions, expected at most 16"):
        pte.deserialize_pte(data)


def test_reading_leaves_the_garbage_collector_as_it_was() -> None:
    data = pte.serialize_pte(add_program())
    for change in (gc.disable, gc.enable):
        change()
        pte.deserialize_pte(data)
        assert gc.isenabled() is (change is gc.enable)


def test_numbers_of_8_bytes_that_are_not_aligned_are_refused() -> None:
    program = add_program()
    program.execution_plan[0].values.append(pte.EValue(pte.DoubleList([1.0])))
    data = bytearray(pte.serialize_pte(program))
    numbers = data.index(struct.pack("<Id", 1, 1.0))
    at = max(at for at in range(0, numbers, 4) if at + _word(data, at) == numbers)
    struct.pack_into("<I", data, at, numbers - at - 4)
    struct.pack_into("<I", data, numbers - 4, 1)
    with pytest.raises(pte.OffsetError, match="8-byte elements"):
        pte.verify_pte(data)


def _word(data: bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")
