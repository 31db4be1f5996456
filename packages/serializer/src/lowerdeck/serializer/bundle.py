"""Bundled programs: ``.bpte`` files with a program and its test cases, written without copies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, TypeAlias

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.field_check import refuse
from lowerdeck.serializer.flatbuffer.limits import MAX_FLATBUFFER
from lowerdeck.serializer.flatbuffer.storage import byte_view, storage_size
from lowerdeck.serializer.flatbuffer.stream import Piece, write_pieces
from lowerdeck.serializer.flatbuffer.wire import BUNDLE_IDENTIFIER, FILE_IDENTIFIER, parse_schema
from lowerdeck.serializer.flatbuffer.writer import UNWRITABLE, Writer
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.pte.named_data import TensorLayout
from lowerdeck.serializer.pte.schema import Bool, Double, EValue, Int, Storage

BUNDLE_VERSION = 2
"""Schema version that ExecuTorch writes."""


@dataclass(slots=True)
class BundledTensor:
    """A tensor with its bytes, as an input or as an expected result.

    Attributes:
        dim_order: Dimensions from the outermost in memory to the innermost.
        data: The elements in that order, without gaps.
    """

    scalar_type: ScalarType
    sizes: list[int]
    dim_order: list[int]
    data: Storage

    @property
    def layout(self) -> TensorLayout:
        """Return the type and shape."""
        return TensorLayout(self.scalar_type, self.sizes, self.dim_order)

    def problem(self) -> str:
        """Return an error message if the shape or byte count is invalid, else ``""``."""
        size, expected = storage_size(self.data), self.layout
        if expected.problem() or expected.nbytes == size:
            return expected.problem()
        shape = f"{self.sizes} of {self.scalar_type!r}"
        return f"found {size} bytes for sizes {shape}, expected {expected.nbytes}"


BundledValue: TypeAlias = BundledTensor | Int | Bool | Double
"""One input or expected result."""


@dataclass(slots=True)
class MethodTestCase:
    """One call of a method.

    Attributes:
        inputs: All inputs, flat and in order.
        expected_outputs: All results, flat and in order; ExecuTorch's tools accept only tensors.
    """

    inputs: list[BundledValue] = field(default_factory=list)
    expected_outputs: list[BundledValue] = field(default_factory=list)


@dataclass(slots=True)
class MethodTestSuite:
    """The test cases of one method.

    Attributes:
        test_cases: Inputs and expected outputs of each call.
    """

    method_name: str
    test_cases: list[MethodTestCase] = field(default_factory=list)


@dataclass(slots=True)
class BundledProgram:
    """A program and its test cases.

    Attributes:
        program: The bytes of a ``.pte`` file.
        method_test_suites: One suite for each method with test cases.
        version: Version of the schema.
    """

    program: Storage
    method_test_suites: list[MethodTestSuite] = field(default_factory=list)
    version: int = BUNDLE_VERSION


BUNDLE_FORMAT = parse_schema(
    "bundled_program.fbs",
    {
        **{kind.__name__: kind for kind in (Int, Bool, Double, ScalarType)},
        "Tensor": BundledTensor,
        "Value": EValue,
    },
)
"""The tables of a ``.bpte`` file; the root is ``BundledProgram``."""

_ALIGNMENT = 32
"""The schema aligns programs to 32 and tensors to 16 bytes; all blobs get the larger alignment."""


def serialize_bundle(bundle: BundledProgram) -> bytes:
    """Return a bundled program as the bytes of a ``.bpte`` file.

    Raises:
        ProgramError: The bundle is invalid; the message names the field.

    Example:
        >>> from lowerdeck.serializer import BundledProgram, ExecutionPlan, Program, serialize_pte
        >>> program = serialize_pte(Program(execution_plan=[ExecutionPlan("forward")]))
        >>> file = serialize_bundle(BundledProgram(program))
        >>> file[4:8], program in file
        (b'BP08', True)
    """
    return b"".join(bundle_pieces(bundle))


def write_bundle(bundle: BundledProgram, path_or_file: str | os.PathLike[str] | BinaryIO) -> int:
    """Write a bundled program to a ``.bpte`` file, streaming it, and return the size in bytes.

    A path is written as a temporary file in the same folder and then renamed.

    Args:
        path_or_file: A path, or a file opened in binary mode.

    Raises:
        ProgramError: The bundle is invalid; no file was changed.
        OSError: The file cannot be written; an existing file at the path is unchanged.
    """
    return write_pieces(bundle_pieces(bundle), path_or_file)


def bundle_pieces(bundle: BundledProgram) -> Iterator[Piece]:
    """Return an iterator over the bytes of a ``.bpte`` file; all checks run first.

    Raises:
        ProgramError: The bundle is invalid; the message names the field.
    """
    untyped: object = bundle
    if not isinstance(untyped, BundledProgram):
        raise ProgramError(f"found a {type(untyped).__name__}, expected a BundledProgram")
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
    names = [suite.method_name for suite in bundle.method_test_suites]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ProgramError(f"method_test_suites: found method {twice!r} twice, expected once")
    for suite in bundle.method_test_suites:
        for number, case in enumerate(suite.test_cases):
            for name in ("inputs", "expected_outputs"):
                for index, value in enumerate(getattr(case, name)):
                    if isinstance(value, BundledTensor):
                        where = (
                            f"method {suite.method_name!r}, test case {number}, {name}[{index}]"
                        )
                        byte_view(value.data, where)
                        if value.problem():
                            raise ProgramError(f"{where}: {value.problem()}")
    root = {
        "version": bundle.version,
        # Sorted by name, as ExecuTorch does.
        "method_test_suites": [
            {"method_name": suite.method_name, "test_cases": list(map(_case, suite.test_cases))}
            for suite in sorted(bundle.method_test_suites, key=lambda suite: suite.method_name)
        ],
        "program": program,
    }
    try:
        writer = Writer(BUNDLE_FORMAT, alignment=_ALIGNMENT)
        return iter(writer.finish("BundledProgram", root, BUNDLE_IDENTIFIER))
    except UNWRITABLE as error:
        refuse(BUNDLE_FORMAT, root, "BundledProgram", error)


def _case(case: MethodTestCase) -> dict[str, list[EValue]]:
    return {
        "inputs": [EValue(value) for value in case.inputs],  # type: ignore[arg-type]
        "expected_outputs": [EValue(value) for value in case.expected_outputs],  # type: ignore[arg-type]
    }
