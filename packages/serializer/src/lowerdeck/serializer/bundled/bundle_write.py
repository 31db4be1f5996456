"""Bundled programs written as ``.bpte`` files, no weight copied."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

from lowerdeck.serializer.bundled.bundle import BundledProgram, BundledTensor, MethodTestCase
from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.assembly import MAX_FLATBUFFER, Assembly
from lowerdeck.serializer.flatbuffer.limits import MAX_RANK
from lowerdeck.serializer.flatbuffer.packing import byte_vector, int_vector
from lowerdeck.serializer.flatbuffer.skeleton import SLOT
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import (
    BUNDLE_IDENTIFIER,
    BUNDLE_TABLES,
    BUNDLED_VALUES,
    FILE_IDENTIFIER,
)
from lowerdeck.serializer.pte.schema import Bool, Double, Int

_ALIGNMENT = 32
"""The schema asks for 32 for the program and for 16 for tensors: all blobs get the wider one."""


def serialize_bundle(bundle: BundledProgram) -> bytes:
    """Return a bundled program as the bytes of a ``.bpte`` file.

    Args:
        bundle: The program and its test cases.

    Raises:
        ProgramError: It cannot be written; the message names the field.

    Example:
        >>> from lowerdeck.serializer import (
        ...     BundledProgram, ExecutionPlan, Program, deserialize_bundle, serialize_pte
        ... )
        >>> program = serialize_pte(Program(execution_plan=[ExecutionPlan("forward")]))
        >>> file = serialize_bundle(BundledProgram(program))
        >>> bytes(deserialize_bundle(file).program) == program
        True
    """
    return b"".join(bundle_pieces(bundle))


def write_bundle(bundle: BundledProgram, path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write a bundled program to a ``.bpte`` file, streaming it, and return the size in bytes.

    A path is written under a temporary name beside it and then renamed.

    Args:
        bundle: The program and its test cases.
        path_or_file: Where to write: a path, or a file open for writing bytes.

    Raises:
        ProgramError: It cannot be written; nothing was touched.
        OSError: The file cannot be written; the old one is as it was.
    """
    return write_pieces(bundle_pieces(bundle), path_or_file)


def bundle_pieces(bundle: BundledProgram) -> Iterator[Piece]:
    """Return an iterator over the bytes of a ``.bpte`` file; all is checked before the first.

    Args:
        bundle: The program and its test cases.

    Raises:
        ProgramError: It cannot be written; the message names the field.
    """
    given: object = bundle
    if not isinstance(given, BundledProgram):
        raise ProgramError(f"found a {type(given).__name__}, expected a BundledProgram")
    program = byte_view(bundle.program, "program")
    if program[4:8] != FILE_IDENTIFIER:
        raise ProgramError(
            f"program: found {bytes(program[:8])!r} at its start, expected the bytes "
            "of a .pte file"
        )
    if len(program) > MAX_FLATBUFFER - 1024:
        raise ProgramError(
            f"program: found {len(program)} bytes; a .bpte file is one FlatBuffer and holds less "
            "than 2 GiB: keep weights in a .ptd file"
        )
    return iter(_Writer(bundle, program).pieces())


class _Writer:
    def __init__(self, bundle: BundledProgram, program: memoryview) -> None:
        self._bundle = bundle
        self._program = program
        self._assembly = Assembly(BUNDLE_TABLES, start=8, blob_alignment=_ALIGNMENT)
        self._skeleton = self._assembly.skeleton

    def pieces(self) -> list[Piece]:
        bundle = self._bundle
        version: object = bundle.version
        if not isinstance(version, int) or not 0 <= version < 1 << 32:
            raise ProgramError(f"version: found {version!r}, expected a number of 32 bits")
        root = self._skeleton.table(
            "BundledProgram",
            {
                "version": version,
                "method_test_suites": SLOT,
                "program": self._assembly.blob(self._program),
            },
        )
        names = [suite.method_name for suite in bundle.method_test_suites]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ProgramError(f"method_test_suites: found method {twice!r} twice, expected once")
        position, slots = self._skeleton.vector(len(names))
        self._skeleton.patch(root["method_test_suites"], position)
        # As ExecuTorch writes them: sorted by name.
        suites = sorted(bundle.method_test_suites, key=lambda suite: suite.method_name)
        for slot, suite in zip(slots, suites, strict=True):
            table = self._skeleton.table(
                "BundledMethodTestSuite",
                {
                    "method_name": self._assembly.words.add_string(suite.method_name),
                    "test_cases": SLOT,
                },
            )
            self._skeleton.patch(slot, table[""])
            position, cases = self._skeleton.vector(len(suite.test_cases))
            self._skeleton.patch(table["test_cases"], position)
            for number, (at, case) in enumerate(zip(cases, suite.test_cases, strict=True)):
                self._case(at, case, f"method {suite.method_name!r}, test case {number}")
        return self._assembly.finish(struct.pack("<I4s", root[""], BUNDLE_IDENTIFIER))

    def _case(self, slot: int, case: MethodTestCase, where: str) -> None:
        table = self._skeleton.table(
            "BundledMethodTestCase", {"inputs": SLOT, "expected_outputs": SLOT}
        )
        self._skeleton.patch(slot, table[""])
        for field, values in (
            ("inputs", case.inputs),
            ("expected_outputs", case.expected_outputs),
        ):
            position, slots = self._skeleton.vector(len(values))
            self._skeleton.patch(table[field], position)
            for number, (at, value) in enumerate(zip(slots, values, strict=True)):
                self._value(at, value, f"{where}, {field}[{number}]")

    def _value(self, slot: int, value: object, where: str) -> None:
        match value:
            case BundledTensor():
                name, fields = "Tensor", self._tensor(value, where)
            case Bool(truth) if isinstance(truth, bool):
                name, fields = "Bool", {"bool_val": truth}
            case Int(number) if isinstance(number, int) and -(1 << 63) <= number < 1 << 63:
                name, fields = "Int", {"int_val": number}
            case Double(real) if isinstance(real, int | float):
                name, fields = "Double", {"double_val": float(real)}
            case _:
                raise ProgramError(
                    f"{where}: found {value!r}, expected a BundledTensor, Int, Bool or Double"
                )
        table = self._skeleton.table(
            "Value", {"val_type": BUNDLED_VALUES.index(name), "val": SLOT}
        )
        self._skeleton.patch(slot, table[""])
        self._skeleton.patch(table["val"], self._skeleton.table(name, fields)[""])

    def _tensor(self, tensor: BundledTensor, where: str) -> dict[str, object]:
        data = byte_view(tensor.data, where)
        rank = len(tensor.sizes)
        if sorted(tensor.dim_order) != list(range(rank)) or rank > MAX_RANK:
            raise ProgramError(
                f"{where}: found sizes {tensor.sizes} and dim_order {tensor.dim_order}, expected "
                f"an order of at most {MAX_RANK} dimensions"
            )
        if any(size < 0 for size in tensor.sizes) or tensor.layout.nbytes != len(data):
            raise ProgramError(
                f"{where}: found {len(data)} bytes for sizes {tensor.sizes} of "
                f"{tensor.scalar_type!r}, expected {tensor.layout.nbytes}"
            )
        try:
            return {
                "scalar_type": int(tensor.scalar_type),
                "sizes": self._assembly.words.add(int_vector(tensor.sizes)),
                "data": self._assembly.blob(data),
                "dim_order": self._assembly.words.add(byte_vector(tensor.dim_order)),
            }
        except ProgramError as error:
            raise ProgramError(f"{where}: {error}") from error
