"""Bundled programs read from ``.bpte`` files, with every offset checked before it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lowerdeck.serializer.bundled.bundle import (
    BundledProgram,
    BundledTensor,
    BundledValue,
    MethodTestCase,
    MethodTestSuite,
)
from lowerdeck.serializer.errors import (
    ContentError,
    EnumError,
    MagicError,
    MissingFieldError,
    TruncatedError,
)
from lowerdeck.serializer.flatbuffer.limits import LIST_COST, MAX_RANK, OBJECT_COST
from lowerdeck.serializer.flatbuffer.storage import byte_view
from lowerdeck.serializer.flatbuffer.tables import TableReader, root_position
from lowerdeck.serializer.flatbuffer.wire import (
    BUNDLE_IDENTIFIER,
    BUNDLE_TABLES,
    BUNDLED_VALUES,
    FILE_IDENTIFIER,
)
from lowerdeck.serializer.pte.decoding import SCALAR_TYPES, member
from lowerdeck.serializer.pte.schema import Bool, Double, Int

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_T = TypeVar("_T")


def is_bundle(data: ReadableBuffer) -> bool:
    """Return whether bytes begin as a ``.bpte`` file does.

    Args:
        data: The file, or its start.
    """
    return byte_view(data, "the file")[4:8] == BUNDLE_IDENTIFIER


def deserialize_bundle(data: ReadableBuffer) -> BundledProgram:
    """Return the bundled program of a ``.bpte`` file, its bytes being views on ``data``.

    Test cases are checked whole: types, shapes, and that each tensor has all its bytes. The
    program is only looked at: ``deserialize_pte``, ``verify_pte`` and the runner check it.

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
    return _BundleReader(view).bundle()


class _BundleReader:
    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._reader = TableReader(view, BUNDLE_TABLES, strict=True)

    def bundle(self) -> BundledProgram:
        version, suites, program_at = self._reader.fields(
            "BundledProgram", root_position(self._view)
        )
        if not program_at:
            raise MissingFieldError("found no program", field="BundledProgram.program")
        program = self._reader.bytes_at(program_at, "BundledProgram.program")
        if program[4:8] != FILE_IDENTIFIER:
            raise ContentError(
                f"found {bytes(program[:8])!r} at its start, expected a .pte file",
                field="BundledProgram.program",
                offset=program_at,
            )
        found: dict[str, MethodTestSuite] = {}
        for at in self._reader.tables(suites, "BundledProgram.method_test_suites"):
            suite = self._suite(at)
            if suite.method_name in found:
                raise ContentError(
                    f"found method {suite.method_name!r} twice",
                    field="BundledMethodTestSuite.method_name",
                    offset=at,
                )
            found[suite.method_name] = suite
        return BundledProgram(program, list(found.values()), version)

    def _suite(self, position: int) -> MethodTestSuite:
        name, cases = self._reader.fields("BundledMethodTestSuite", position)
        return MethodTestSuite(
            self._reader.string(name, "BundledMethodTestSuite.method_name"),
            self._each(cases, "BundledMethodTestSuite.test_cases", self._case),
        )

    def _case(self, position: int) -> MethodTestCase:
        inputs, outputs = self._reader.fields("BundledMethodTestCase", position)
        return MethodTestCase(
            self._each(inputs, "BundledMethodTestCase.inputs", self._value),
            self._each(outputs, "BundledMethodTestCase.expected_outputs", self._value),
        )

    def _each(self, vector: int, field: str, make: Callable[[int], _T]) -> list[_T]:
        made = []
        for at in self._reader.tables(vector, field):
            self._reader.spend(OBJECT_COST + LIST_COST, field, at)
            made.append(make(at))
        return made

    def _value(self, position: int) -> BundledValue:
        number, at = self._reader.fields("Value", position)
        if not 0 < number < len(BUNDLED_VALUES):
            raise EnumError(
                f"found kind {number}, expected 1 to {len(BUNDLED_VALUES) - 1}",
                field="Value.val_type",
                offset=position,
            )
        if not at:
            raise MissingFieldError("found no value", field="Value.val", offset=position)
        name = BUNDLED_VALUES[number]
        if name == "Tensor":
            return self._tensor(at)
        (plain,) = self._reader.fields(name, at)
        if name == "Int":
            return Int(plain)
        return Bool(bool(plain)) if name == "Bool" else Double(float(plain))

    def _tensor(self, position: int) -> BundledTensor:
        kind, sizes_at, data_at, order_at = self._reader.fields("Tensor", position)
        tensor = BundledTensor(
            member(SCALAR_TYPES, kind, "Tensor.scalar_type", position),
            self._reader.scalars(sizes_at, "i32", "Tensor.sizes", MAX_RANK),
            self._reader.scalars(order_at, "u8", "Tensor.dim_order", MAX_RANK),
            self._reader.bytes_at(data_at, "Tensor.data"),
        )
        rank = len(tensor.sizes)
        if min(tensor.sizes, default=0) < 0 or sorted(tensor.dim_order) != list(range(rank)):
            raise ContentError(
                f"found sizes {tensor.sizes} and dim_order {tensor.dim_order}",
                field="Tensor",
                offset=position,
            )
        if tensor.layout.nbytes != len(tensor.data):  # type: ignore[arg-type]
            raise ContentError(
                f"found {len(tensor.data)} bytes for sizes {tensor.sizes}, expected "  # type: ignore[arg-type]
                f"{tensor.layout.nbytes}",
                field="Tensor.data",
                offset=position,
            )
        return tensor
