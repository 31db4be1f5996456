"""Promises of the writer beyond that a file can be read back."""

from __future__ import annotations

import io
import mmap
import struct
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck import serializer as pte
from lowerdeck_files.programs import add_delegates, add_program, tensor


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 16, 100, 128, 4096]),
    st.sampled_from([1, 16, 64, 256]),
    st.sampled_from([1, 8, 24, 512, 4096]),
)
def test_every_alignment_holds_from_the_start_of_the_file(
    segment: int, tensor: int, own: int
) -> None:
    program = add_delegates(add_program(), b"<delegate>")
    program.constant_buffer += [pte.Buffer(b"<first>"), pte.Buffer(b"<second>")]
    program.named_data += [
        pte.NamedData("a", b"<named>", own),
        pte.NamedData("b", b"<second>", own),
    ]
    data = pte.serialize_pte(program, segment_alignment=segment, constant_tensor_alignment=tensor)
    for mark, alignment in (
        (b"<first>", tensor),
        (b"<second>", tensor),
        (b"<delegate>", segment),
        (b"<named>", own),
        (b"<named>", segment),
        (b"<second>", own),
        (b"<second>", segment),
    ):
        assert data.count(mark) == 1
        assert data.index(mark) % alignment == 0
    program.named_data.clear()
    inline = {"delegate_alignment": tensor, "extract_delegate_segments": False}
    assert pte.serialize_pte(program, **inline).index(b"<delegate>") % tensor == 0  # type: ignore[arg-type]


def test_a_named_blob_that_is_a_constant_is_a_segment_inside_the_constant_segment() -> None:
    embedding = bytes(range(256)) * 40
    program = add_program()
    program.constant_buffer.append(pte.Buffer(embedding))
    program.named_data.append(pte.NamedData("tied", bytearray(embedding), 16))
    data = pte.serialize_pte(program)
    assert data.count(embedding) == 1
    outer, inner = pte.PteFile(data).segments
    assert outer.offset <= inner.offset
    assert inner.offset + inner.size <= outer.offset + outer.size
    assert bytes(pte.deserialize_pte(data).named_data[0].data) == embedding  # type: ignore[arg-type]


def test_equal_blobs_values_and_strings_are_stored_once() -> None:
    blob = b"a blob that many share" * 8
    program = add_delegates(add_program(), blob)
    program.constant_buffer += [pte.Buffer(blob), pte.Buffer(blob)]
    plan = program.execution_plan[0]
    plan.values += [pte.EValue(pte.Int(77)) for _ in range(1000)]
    plan.delegates *= 3
    data = pte.serialize_pte(program)
    # The constant and the delegate are of two kinds, but each is there once.
    assert data.count(blob) == 2
    assert data.count(struct.pack("<q", 77)) == 1
    assert data.count(b"Backend\0") == 1


def test_names_of_a_store_are_written_beside_those_of_the_program() -> None:
    store = pte.NamedDataStore()
    store.add_named_data("b", b"2", 32)
    output = store.get_named_data_store_output()
    program = add_program()
    program.named_data.append(pte.NamedData("a", b"1"))
    read = pte.deserialize_pte(pte.serialize_pte(program, named_data=output)).named_data
    assert {entry.key: bytes(entry.data) for entry in read} == {"a": b"1", "b": b"2"}  # type: ignore[arg-type]
    program.named_data.append(pte.NamedData("b", b"1"))
    with pytest.raises(pte.NamedDataConflictError, match="'b'"):
        pte.serialize_pte(program, named_data=output)


def test_a_file_ends_with_its_segments_and_without_data_has_no_header() -> None:
    program = add_program()
    program.constant_buffer[1] = pte.Buffer(b"")
    program.execution_plan[0].values[1] = tensor((0, 4), index=1)
    for made in (program, add_program()):
        data = pte.serialize_pte(made)
        header = pte.PteFile(data).header
        assert header is not None
        assert header.segment_base_offset + header.segment_data_size == len(data)
    # Constants that are all empty still load.
    pte.verify_pte(pte.serialize_pte(program))
    assert pte.PteFile(pte.serialize_pte(program)).segments[0].size == 1
    assert pte.PteFile(pte.serialize_pte(pte.Program())).header is None
    assert len(pte.serialize_pte(pte.Program())) >= 64


@pytest.mark.parametrize(
    "storage",
    [
        bytearray(range(24)),
        memoryview(bytes(range(24))),
        memoryview(bytes(range(24))).cast("f", (2, 3)),
        array("B", range(24)),
    ],
)
def test_anything_with_a_buffer_can_be_stored(storage: Any) -> None:
    program = add_program()
    program.constant_buffer[1] = pte.Buffer(storage)
    assert pte.serialize_pte(program) == pte.serialize_pte(add_program())


@pytest.mark.parametrize("offset", [0, 5001])
def test_a_range_of_a_file_can_be_stored(offset: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(offset) + bytes(range(24)) + b"rest")
    program = add_program()
    program.constant_buffer[1] = pte.Buffer(pte.FileRange(path, offset, 24))
    assert pte.serialize_pte(program) == pte.serialize_pte(add_program())
    program.constant_buffer[1] = pte.Buffer(pte.FileRange(path, offset, 99))
    with pytest.raises(pte.ProgramError, match="holds only"):
        pte.serialize_pte(program)


def test_a_buffer_is_written_without_being_copied(tmp_path: Path) -> None:
    size = 1 << 25
    memory = mmap.mmap(-1, size)
    program = add_program()
    program.constant_buffer.append(pte.Buffer(memory))
    program.named_data.append(pte.NamedData("k", memoryview(memory)[: size // 2]))
    tracemalloc.start()
    pte.write_pte(program, tmp_path / "big.pte")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size // 20


def test_a_path_keeps_its_permissions_and_an_open_file_gets_the_same_bytes(tmp_path: Path) -> None:
    path, file = tmp_path / "model.pte", io.BytesIO()
    pte.write_pte(add_program(), path)
    path.chmod(0o640)
    assert (
        pte.write_pte(add_program(), path)
        == pte.write_pte(add_program(), file)
        == len(file.getvalue())
    )
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() == file.getvalue() == pte.serialize_pte(add_program())


@pytest.mark.parametrize(
    ("field", "item", "message"),
    [
        ("values", pte.EValue(object()), r"values\[4\].val: found <object"),  # type: ignore[arg-type]
        ("values", pte.EValue(pte.Int(2**63)), r"values\[4\].*9223372036854775808"),
        ("values", pte.EValue(pte.Int("1")), r"values\[4\].*int_val: found '1'"),  # type: ignore[arg-type]
        ("values", tensor((2**31,)), r"values\[4\].*2147483648"),
        ("instructions", pte.Instruction(pte.Null()), r"instructions\[1\].*KernelCall"),  # type: ignore[arg-type]
        ("instructions", pte.Instruction(pte.KernelCall(0, [2**40])), r"ions\[1\].*1099511627776"),
        (
            "instructions",
            pte.Instruction(pte.KernelCall(2**40, [])),
            r"ions\[1\].*op_index: found 109951",
        ),
        ("inputs", "x", "method 'forward'"),
        (
            "delegates",
            pte.BackendDelegate("b", pte.BackendDelegateDataReference(pte.DataLocation.INLINE, 3)),
            r"delegates\[0\]\.processed: found index 3",
        ),
    ],
)
def test_what_cannot_be_stored_is_named(field: str, item: object, message: str) -> None:
    program = add_program()
    plan = program.execution_plan[0]
    getattr(plan.chains[0] if field == "instructions" else plan, field).append(item)
    with pytest.raises(pte.ProgramError, match=message):
        pte.serialize_pte(program)


@pytest.mark.parametrize("given", [None, b"ET12"])
def test_what_is_no_program_is_refused(given: Any) -> None:
    with pytest.raises(pte.ProgramError, match="expected a Program"):
        pte.serialize_pte(given)
