"""`.bpte` files: programs with their test cases."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck_files.programs import BUNDLE, add_program

_PTE = pte.serialize_pte(add_program())


def test_a_file_is_the_same_whatever_writes_it_and_lies_aligned(tmp_path: Path) -> None:
    path, open_file = tmp_path / "model.bpte", BytesIO()
    size = pte.write_bundle(BUNDLE, path)
    pte.write_bundle(BUNDLE, open_file)
    file = path.read_bytes()
    assert size == len(file)
    assert file == open_file.getvalue() == pte.serialize_bundle(BUNDLE)
    assert file.index(_PTE) % 32 == 0
    assert file.index(bytes(range(100, 124))) % 16 == 0
    # Equal tensors are written once.
    assert file.count(bytes(range(100, 124))) == 1
    with pytest.raises(pte.MagicError, match=r"this is a \.bpte"):
        pte.deserialize_pte(file)


def _bundle(value: Any) -> pte.BundledProgram:
    case = pte.MethodTestCase([value], [])
    return pte.BundledProgram(_PTE, [pte.MethodTestSuite("forward", [case])])


def _ints(sizes: list[int], order: list[int]) -> pte.BundledTensor:
    return pte.BundledTensor(pte.ScalarType.INT, sizes, order, b"1234")


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        (None, "expected a BundledProgram"),
        (pte.BundledProgram(b"no program"), "bytes of a .pte file"),
        (pte.BundledProgram(_PTE, version=-1), "version: found -1"),
        (pte.BundledProgram(_PTE, [pte.MethodTestSuite("a")] * 2), "'a' twice"),
        (_bundle(pte.String("text")), r"test_cases\[0\]\.inputs\[0\].*found String"),
        (_bundle(pte.Int(1 << 63)), "int_val: found 9223372036854775808"),
        (_bundle(_ints([2], [0])), "found 4 bytes for sizes .2."),
        (_bundle(_ints([1], [1])), "dim_order .1."),
    ],
)
def test_what_cannot_be_written_is_told(bundle: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bpte"
    with pytest.raises(pte.ProgramError, match=words):
        pte.write_bundle(bundle, path)
    assert not path.exists()
