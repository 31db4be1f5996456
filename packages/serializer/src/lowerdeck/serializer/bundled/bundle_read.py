"""Read bundled programs from ``.bpte`` files; every offset is checked before use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowerdeck.serializer.bundled.bundle import (
    BUNDLE_FORMAT,
    BundledProgram,
    BundledTensor,
    MethodTestCase,
    MethodTestSuite,
)
from lowerdeck.serializer.errors import (
    ContentError,
    MagicError,
    MissingFieldError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.objects import ObjectReader
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.tables import root_position
from lowerdeck.serializer.flatbuffer.wire import BUNDLE_IDENTIFIER, FILE_IDENTIFIER

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def is_bundle(data: ReadableBuffer) -> bool:
    """Return whether ``data`` has the identifier of a ``.bpte`` file.

    Args:
        data: The file, or its start.
    """
    return byte_view(data, "the file")[4:8] == BUNDLE_IDENTIFIER


def deserialize_bundle(data: ReadableBuffer) -> BundledProgram:
    """Return the bundled program of a ``.bpte`` file, with buffers as views of ``data``.

    Test cases are fully checked: types, shapes and byte counts. Of the program only the identifier
    is checked; use ``deserialize_pte`` or ``verify_pte`` for the rest.

    Args:
        data: The file: bytes, a memory map, or anything else with the buffer protocol.

    Raises:
        FormatError: The file is malformed.
    """
    view = byte_view(data, "the file")
    if len(view) < 8:
        raise TruncatedError(f"found {len(view)} bytes, expected at least 8", field="file")
    if not is_bundle(view):
        raise MagicError(
            f"found {bytes(view[4:8])!r}, expected {BUNDLE_IDENTIFIER!r}",
            field="file identifier",
            offset=4,
        )
    reader = ObjectReader(view, BUNDLE_FORMAT, strict=True)
    tables = reader.tables
    version, suites, program_at = tables.fields("BundledProgram", root_position(view))
    if not program_at:
        raise MissingFieldError("found no program", field="BundledProgram.program")
    program = tables.bytes_at(program_at, "BundledProgram.program")
    if program[4:8] != FILE_IDENTIFIER:
        raise ContentError(
            f"found {bytes(program[:8])!r} at its start, expected a .pte file",
            field="BundledProgram.program",
            offset=program_at,
        )
    suites_by_name: dict[str, MethodTestSuite] = {}
    for at in tables.tables(suites, "BundledProgram.method_test_suites"):
        name_at, cases = tables.fields("BundledMethodTestSuite", at)
        name = tables.string(name_at, "BundledMethodTestSuite.method_name")
        if name in suites_by_name:
            raise ContentError(
                f"found method {name!r} twice",
                field="BundledMethodTestSuite.method_name",
                offset=at,
            )
        where = "BundledMethodTestSuite.test_cases"
        suites_by_name[name] = MethodTestSuite(
            name, [_case(reader, case) for case in tables.tables(cases, where)]
        )
    return BundledProgram(program, list(suites_by_name.values()), version)


def _case(reader: ObjectReader, position: int) -> MethodTestCase:
    inputs, outputs = reader.tables.fields("BundledMethodTestCase", position)
    case = MethodTestCase(
        [entry.val for entry in reader.objects(inputs, "Value", "inputs")],
        [entry.val for entry in reader.objects(outputs, "Value", "expected_outputs")],
    )
    for value in (*case.inputs, *case.expected_outputs):
        problem = value.problem() if isinstance(value, BundledTensor) else ""
        if problem:
            raise ContentError(problem, field="Tensor")
    return case
