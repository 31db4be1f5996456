"""Tables as they are in a file: for each its fields in id order, and their kinds.

A kind is a scalar (``i32``), ``str``, ``bytes`` (a vector of bytes that is not copied), a vector
(``[i32]``, ``[Tensor]``), a table (``Tensor``) or a union (``union``, whose type is the field
before it). Reading, writing and checking all go by these descriptions, which are parsed from the
schemas in ``fbs``.
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
ETDUMP_IDENTIFIER = b"ED00"

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
        of: The enumeration of a number, or the union of a union or of the number of its member.
        is_required: Whether a table without it is refused.
        most: The most entries that its vector may have, 0 for any number.
        is_aligned: Whether its bytes are aligned more than to 4.
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
        """Return whether the field holds an offset to something else."""
        return self.kind not in SCALAR_CODES

    @property
    def item(self) -> str:
        """Return the kind of the entries of a vector, or ``""``."""
        return self.kind[1:-1] if self.kind[0] == "[" else ""

    @property
    def code(self) -> str:
        """Return the struct code of what the table itself holds."""
        return SCALAR_CODES.get(self.kind, "I")

    @property
    def size(self) -> int:
        """Return the number of bytes in the table itself."""
        return SCALAR_SIZES.get(self.kind, 4)


class Format:
    """The tables of one format, and the classes that represent them.

    Attributes:
        tables: Fields of each table by its name.
        unions: Names of the members of each union; the number of a member is its index.
        classes: Classes of tables and enumerations by name. A table without one is written of
            dictionaries.
        layouts: Layouts of tables that a writer computed, by their names and fields.
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
        """Return whether a field is None in an object where it is absent.

        Args:
            name: Its table. That of a class has None as the default of such a field.
            field: The field, which holds an offset.
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

    ``name:kind=-1`` is one that is always written, as readers take -1 for an absent one.
    """
    parts = [re.split("[:=]", part) for part in text.split()]
    return tuple(
        Field(name, kind, default=int(*rest)) if rest else Field(name, kind)
        for name, kind, *rest in parts
    )


def parse_schema(file: str, classes: Mapping[str, type]) -> Format:
    """Return the format that a schema describes.

    Args:
        file: Name of the schema in the folder ``fbs``.
        classes: Classes of its tables and enumerations by name.
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


ETDUMP_FORMAT = Format(
    {
        "ETDump": parse_fields("version:u32 run_data:[RunData]"),
        "RunData": parse_fields(
            "name:str bundled_input_index:i32=-1 allocators:[Allocator] events:[Event]"
        ),
        "Event": parse_fields(
            "profile_event:ProfileEvent allocation_event:AllocationEvent debug_event:DebugEvent"
        ),
        "ProfileEvent": parse_fields(
            "name:str chain_index:i32=-1 instruction_id:i32=-1 delegate_debug_id_int:i32=-1"
            " delegate_debug_id_str:str delegate_debug_metadata:bytes start_time:u64 end_time:u64"
        ),
    }
)
"""The tables that we write of an ETDump file; the root is ``ETDump``."""
