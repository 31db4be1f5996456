"""Descriptions of FlatBuffer tables: their fields in id order, with kinds.

A kind is a scalar (``i32``), ``str``, ``bytes`` (a vector of bytes that is not copied), a vector
(``[i32]``, ``[Tensor]``), a table (``Tensor``) or a union (``union``, whose type is the field
before it). Reading, writing and checking use these descriptions, which are parsed from the schemas
in ``fbs``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from pkgutil import get_data
from struct import calcsize
from typing import Any, NamedTuple

from lowerdeck.serializer.flatbuffer.limits import MAX_RANK

FILE_IDENTIFIER = b"ET12"
EXTERNAL_IDENTIFIER = b"FT01"
BUNDLE_IDENTIFIER = b"BP08"

SCALAR_CODES = {
    "u8": "B",
    "i8": "b",
    "bool": "?",
    "i16": "h",
    "i32": "i",
    "u32": "I",
    "i64": "q",
    "u64": "Q",
    "f32": "f",
    "f64": "d",
}
SCALAR_SIZES = {kind: calcsize(f"<{code}") for kind, code in SCALAR_CODES.items()}
_KINDS = {
    "ubyte": "u8",
    "byte": "i8",
    "int": "i32",
    "uint": "u32",
    "long": "i64",
    "ulong": "u64",
    "double": "f64",
    "string": "str",
}


class Field(NamedTuple):
    """One field of a table.

    Attributes:
        of: Name of the field's enumeration or union; also set for the type field of a union.
        is_required: Whether tables without the field are rejected.
        most: Maximum number of entries of a vector, 0 for no limit.
        is_aligned: Whether the bytes need an alignment above 4.
        default: The value of an absent field.
    """

    name: str
    kind: str
    of: str = ""
    is_required: bool = False
    most: int = 0
    is_aligned: bool = False
    default: int = 0

    @property
    def is_offset(self) -> bool:
        """Return whether the field holds an offset."""
        return self.kind not in SCALAR_CODES

    @property
    def item(self) -> str:
        """Return the element kind of a vector field, else ``""``."""
        return self.kind[1:-1] if self.kind[0] == "[" else ""

    @property
    def code(self) -> str:
        """Return the struct code of the field in the table."""
        return SCALAR_CODES.get(self.kind, "I")

    @property
    def size(self) -> int:
        """Return the size of the field in the table."""
        return SCALAR_SIZES.get(self.kind, 4)


class Format:
    """The tables of one format, and the classes that represent them.

    Attributes:
        tables: Fields of each table by its name.
        unions: Names of the members of each union; the number of a member is its index.
        classes: Classes of tables and enumerations by name. Tables without a class are written
            from dictionaries.
        layouts: Cache of table layouts by table name and present fields.
    """

    def __init__(
        self,
        tables: Mapping[str, tuple[Field, ...]],
        unions: Mapping[str, tuple[str, ...]] | None = None,
        classes: Mapping[str, type] | None = None,
    ) -> None:
        self.tables = tables
        self.unions: Mapping[str, tuple[str, ...]] = unions or {}
        self.classes: Mapping[str, type] = classes or {}
        self.names: dict[type, str] = {
            self.classes[name]: name for name in tables if name in self.classes
        }
        self.layouts: dict[tuple[object, ...], Any] = {}
        self._optional: dict[str, frozenset[str]] = {}

    def may_miss(self, name: str, field: Field) -> bool:
        """Return whether an absent field is None in the object.

        Args:
            name: Name of the table; if it has a class, the default of the attribute decides.
            field: A field that holds an offset.
        """
        if name not in self.classes:
            return not field.is_required
        if name not in self._optional:
            fields = dataclasses.fields(self.classes[name])
            self._optional[name] = frozenset(
                entry.name for entry in fields if entry.default is None
            )
        return field.name in self._optional[name]

    def members(self, name: str) -> Mapping[int, IntEnum]:
        """Return the members of an enumeration by their numbers."""
        return _members(self.classes[name])


@cache
def _members(kind: type[IntEnum]) -> Mapping[int, IntEnum]:
    return {int(member): member for member in kind}


def parse_fields(text: str) -> tuple[Field, ...]:
    """Return the fields of a table, written ``name:kind`` and in the order of their ids.

    ``name:kind=-1`` gives the field a default other than 0: a reader takes an absent field as -1,
    so the writer always writes the field.
    """
    parts = [re.split("[:=]", part) for part in text.split()]
    return tuple(
        Field(name, kind, default=int(*rest)) if rest else Field(name, kind)
        for name, kind, *rest in parts
    )


def parse_schema(file: str, classes: Mapping[str, type]) -> Format:
    """Return the format described by a schema.

    Args:
        file: Name of the schema in the folder ``fbs``.
        classes: Classes of tables and enumerations by name.
    """
    raw = get_data("lowerdeck.serializer", f"fbs/{file}") or b""
    text = re.sub(r"//.*", "", raw.decode())
    unions = {
        name: ("NONE", *re.findall(r"\w+", body))
        for name, body in re.findall(r"union (\w+) \{(.*?)\}", text, re.DOTALL)
    }
    enums = re.findall(r"enum (\w+)", text)
    tables: dict[str, tuple[Field, ...]] = {}
    for name, body in re.findall(r"table (\w+) \{(.*?)\}", text, re.DOTALL):
        fields = []
        for field, written, rest in re.findall(r"(\w+): ([\w\[\]]+)([^;]*);", body):
            kind, of = written.strip("[]"), ""
            if kind in unions:
                fields.append(Field(f"{field}_type", "u8", kind))
                kind, of = "union", kind
            elif kind in enums:
                kind, of = "i8", kind
            kind = written.replace(written.strip("[]"), _KINDS.get(kind, kind))
            most = MAX_RANK if "rank" in rest else 0
            if kind == "[u8]" and not most:
                kind = "bytes"
            fields.append(Field(field, kind, of, "required" in rest, most, "force_align" in rest))
        tables[name] = tuple(fields)
    return Format(tables, unions, classes)
