"""The values of methods as records; equal values are stored once."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.flatbuffer.assembly import Assembly
from lowerdeck.serializer.flatbuffer.packing import (
    bool_vector,
    double_vector,
    int_vector,
    long_vector,
)
from lowerdeck.serializer.flatbuffer.sections import Records
from lowerdeck.serializer.flatbuffer.union_record import start_union_record
from lowerdeck.serializer.flatbuffer.wire import KERNEL_TYPES
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.encoding.encode_tensors import TensorEncoder

_REFERENCE = "offset"
# For each kind: the bytes of its table, its one field, and the words that hold it.
_SHAPES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "Null": (4, "", ()),
    "Int": (12, "int_val", ("I", "I")),
    "Bool": (8, "bool_val", ("I",)),
    "Double": (12, "double_val", ("I", "I")),
    "String": (8, "string_val", (_REFERENCE,)),
    "IntList": (8, "items", (_REFERENCE,)),
    "DoubleList": (8, "items", (_REFERENCE,)),
    "BoolList": (8, "items", (_REFERENCE,)),
    "TensorList": (8, "items", (_REFERENCE,)),
    "OptionalTensorList": (8, "items", (_REFERENCE,)),
}
_pack_long = struct.Struct("<q").pack
_pack_double = struct.Struct("<d").pack
_unpack_words = struct.Struct("<2I").unpack


class ValueEncoder:
    """Turns EValues into references to stored ones."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._seen: dict[tuple[str, tuple[int, ...]], int] = {}
        self._records: dict[str, tuple[Records, list[list[int]]]] = {}
        words, longs = assembly.words, assembly.longs
        store = self._store
        self._encoders: dict[type, Callable[[Any], int]] = {
            schema.Tensor: TensorEncoder(assembly).add,
            schema.Null: lambda _: store("Null", ()),
            schema.Int: lambda val: store("Int", _unpack_words(_pack_long(val.int_val))),
            schema.Bool: lambda val: store("Bool", (bool(val.bool_val),)),
            schema.Double: lambda val: store(
                "Double", _unpack_words(_pack_double(val.double_val))
            ),
            schema.String: lambda val: store("String", (words.add_string(val.string_val),)),
            schema.IntList: lambda val: store("IntList", (longs.add(long_vector(val.items)),)),
            schema.DoubleList: lambda val: store(
                "DoubleList", (longs.add(double_vector(val.items)),)
            ),
            schema.BoolList: lambda val: store("BoolList", (words.add(bool_vector(val.items)),)),
            schema.TensorList: lambda val: store(
                "TensorList", (words.add(int_vector(val.items)),)
            ),
            schema.OptionalTensorList: lambda val: store(
                "OptionalTensorList", (words.add(int_vector(val.items)),)
            ),
        }

    def add_all(self, values: list[schema.EValue], where: str) -> list[int]:
        """Return a reference for each value.

        Args:
            values: The values of one method.
            where: Name of the method, for messages.

        Raises:
            ProgramError: A value is none of the union, or holds what its fields cannot.
        """
        encoders = self._encoders
        references: list[int] = []
        append = references.append
        try:
            for value in values:
                val = value.val
                append(encoders[type(val)](val))
        except (KeyError, AttributeError, TypeError, struct.error, ProgramError) as error:
            index = len(references)
            raise ProgramError(
                f"{where}.values[{index}]: found {values[index]!r}, which no field holds: {error}"
            ) from error
        return references

    def _store(self, kind: str, words: tuple[int, ...]) -> int:
        key = (kind, words)
        found = self._seen.get(key)
        if found is None:
            records, columns = self._records.get(kind) or self._start(kind)
            for column, word in zip(columns, words, strict=True):
                column.append(word)
            found = self._seen[key] = records.append()
        return found

    def _start(self, kind: str) -> tuple[Records, list[list[int]]]:
        size, field, words = _SHAPES[kind]
        records = start_union_record(
            self._assembly,
            *("EValue", "val_type", "val", KERNEL_TYPES.index(kind)),
            *(kind, size, {field: 4} if field else {}),
            # The 8 bytes of a number start 16 bytes into its record.
            alignment=8 if len(words) == 2 else 4,
        )
        columns = [
            records.references() if code == _REFERENCE else records.numbers(code, kind)
            for code in words
        ]
        self._records[kind] = records, columns
        return records, columns
