"""`.bpte` files: programs with their test cases."""

from __future__ import annotations

import struct
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck import serializer as pte

_PTE = pte.serialize_pte(add_program())
_SIZES = struct.pack("<III", 2, 4, 6)
_TENSOR = pte.BundledTensor(pte.ScalarType.CHAR, [4, 6], [0, 1], bytes(range(100, 124)))
_BUNDLE = pte.BundledProgram(
    _PTE,
    [
        pte.MethodTestSuite(
            "forward",
            [
                pte.MethodTestCase(
                    [_TENSOR, pte.Int(-3), pte.Bool(True), pte.Double(0.5)], [_TENSOR]
                ),
                pte.MethodTestCase([pte.Int(0), pte.Bool(False), pte.Double(0.0)], []),
            ],
        ),
        pte.MethodTestSuite("other", []),
    ],
)

_shapes = st.lists(st.integers(0, 3), max_size=3)
_tensors = _shapes.flatmap(
    lambda sizes: st.builds(
        pte.BundledTensor,
        st.just(pte.ScalarType.SHORT),
        st.just(sizes),
        st.permutations(range(len(sizes))).map(list),
        st.binary(min_size=2 * prod(sizes), max_size=2 * prod(sizes)),
    )
)
_values = (
    _tensors
    | st.builds(pte.Int, st.integers(-(1 << 63), (1 << 63) - 1))
    | st.builds(pte.Bool, st.booleans())
    | st.builds(pte.Double, st.floats(allow_nan=False))
)
_cases = st.builds(
    pte.MethodTestCase, st.lists(_values, max_size=3), st.lists(_values, max_size=3)
)
_suites = st.lists(
    st.builds(pte.MethodTestSuite, st.text(max_size=5), st.lists(_cases, max_size=3)),
    max_size=3,
    unique_by=lambda suite: suite.method_name,
)


@given(_suites)
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read(suites: list[pte.MethodTestSuite]) -> None:
    suites = sorted(suites, key=lambda suite: suite.method_name)
    found = pte.deserialize_bundle(pte.serialize_bundle(pte.BundledProgram(_PTE, suites)))
    assert found == pte.BundledProgram(_PTE, suites)


def test_a_file_is_the_same_whatever_writes_it_and_lies_aligned(tmp_path: Path) -> None:
    path, open_file = tmp_path / "model.bpte", BytesIO()
    size = pte.write_bundle(_BUNDLE, path)
    pte.write_bundle(_BUNDLE, open_file)
    file = path.read_bytes()
    assert size == len(file)
    assert file == open_file.getvalue() == pte.serialize_bundle(_BUNDLE)
    assert pte.serialize_bundle(pte.deserialize_bundle(file)) == file
    assert (pte.is_bundle(file), pte.is_bundle(_PTE)) == (True, False)
    assert file.index(_PTE) % 32 == 0
    assert file.index(bytes(range(100, 124))) % 16 == 0
    # Equal tensors are written once, and the program is not copied.
    assert file.count(bytes(range(100, 124))) == 1
    program = pte.deserialize_bundle(file).program
    assert isinstance(program, memoryview)
    assert program.obj is file
    with pytest.raises(pte.MagicError, match=r"this is a \.bpte"):
        pte.deserialize_pte(file)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_files_are_refused_or_read(data: st.DataObject) -> None:
    file = bytearray(pte.serialize_bundle(_BUNDLE))
    program = file.index(_PTE)
    around = [*range(0, program, 4), *range(program + len(_PTE), len(file), 4)]
    for at in data.draw(st.lists(st.sampled_from(around), min_size=1, max_size=4)):
        number = data.draw(st.sampled_from([0, 1, 4, len(file), 1 << 31, (1 << 32) - 1]))
        near = data.draw(st.integers(-8, 8)) + struct.unpack_from("<I", file, at)[0]
        chosen = data.draw(st.sampled_from([number, near % (1 << 32)]))
        struct.pack_into("<I", file, at, chosen)
    try:
        found = pte.deserialize_bundle(bytes(file[: data.draw(st.integers(0, 2 * len(file)))]))
    except pte.FormatError:
        return
    for suite in found.method_test_suites:
        for case in suite.test_cases:
            for value in (*case.inputs, *case.expected_outputs):
                if isinstance(value, pte.BundledTensor):
                    assert value.layout.nbytes == len(bytes(value.data))  # type: ignore[arg-type]


def _patched(old: bytes, new: bytes) -> bytes:
    file = pte.serialize_bundle(_BUNDLE)
    assert file.count(old) == 1
    return file.replace(old, new)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", pte.FormatError, "0 bytes"),
        (_PTE, pte.MagicError, "ET12"),
        (_patched(_PTE[:8], _PTE[:4] + b"XX12"), pte.ContentError, "expected a .pte file"),
        (_patched(_SIZES, struct.pack("<III", 2, 4, 7)), pte.ContentError, "24"),
        (_patched(_SIZES, struct.pack("<IIi", 2, 2, -3)), pte.ContentError, "-3"),
    ],
)
def test_hostile_files(data: bytes, error: type[pte.FormatError], words: str) -> None:
    with pytest.raises(error, match=words):
        pte.deserialize_bundle(data)


def test_kinds_that_are_none() -> None:
    file = bytearray(pte.serialize_bundle(_bundle(pte.Int(7))))
    found = [at for at in range(len(file)) if _reads(file, at, 9) is pte.EnumError]
    assert found, "no byte is the kind of a value"
    gone = [at for at in range(len(file)) if _reads(file, at, 0) is pte.MissingFieldError]
    assert gone, "no byte leads to the program"


def _bundle(value: Any) -> pte.BundledProgram:
    case = pte.MethodTestCase([value], [])
    return pte.BundledProgram(_PTE, [pte.MethodTestSuite("forward", [case])])


def _ints(sizes: list[int], order: list[int]) -> pte.BundledTensor:
    return pte.BundledTensor(pte.ScalarType.INT, sizes, order, b"1234")


def _reads(file: bytearray, at: int, value: int) -> type[Exception] | None:
    changed = bytearray(file)
    changed[at] = value
    try:
        pte.deserialize_bundle(bytes(changed))
    except pte.FormatError as error:
        return type(error)
    return None


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        (None, "expected a BundledProgram"),
        (pte.BundledProgram(b"no program"), "bytes of a .pte file"),
        (pte.BundledProgram(_PTE, version=-1), "version: found -1"),
        (pte.BundledProgram(_PTE, [pte.MethodTestSuite("a")] * 2), "'a' twice"),
        (_bundle(pte.String("text")), r"test case 0, inputs\[0\]: found String"),
        (_bundle(pte.Int(1 << 63)), "found Int"),
        (_bundle(_ints([2], [0])), "found 4 bytes for sizes .2."),
        (_bundle(_ints([1], [1])), "dim_order .1."),
    ],
)
def test_what_cannot_be_written_is_told(bundle: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bpte"
    with pytest.raises(pte.ProgramError, match=words):
        pte.write_bundle(bundle, path)
    assert not path.exists()
