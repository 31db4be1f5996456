"""Files built to take long, made from the schemas: one for each list, text and run of bytes.

Each takes a number and returns a file that grows with it, in three forms: ``long``, where one
table has a long field; ``shared``, where a list leads to that table again and again; and
``common``, where many tables lead to one long field. The last two unfold to the square of their
size. What no schema tells is in ``serializer_attacks``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from lowerdeck.serializer.flatbuffer.assembly import Assembly
from lowerdeck.serializer.flatbuffer.packing import (
    bool_vector,
    byte_vector,
    double_vector,
    int_vector,
    long_vector,
)
from lowerdeck.serializer.flatbuffer.skeleton import SLOT
from lowerdeck.serializer.flatbuffer.wire import (
    EXTERNAL_TABLES,
    INSTRUCTION_ARGUMENTS,
    KERNEL_TYPES,
    PROGRAM_TABLES,
    SCALAR_CODES,
    Field,
)
from lowerdeck.serializer.ptd.external_write import HEADER_LENGTH, HEADER_MAGIC, HEADER_STRUCT

Construction = Callable[[int], bytes]
FORMS = ("long", "shared", "common")

_PACKERS = {
    "i32": int_vector,
    "u8": byte_vector,
    "i64": long_vector,
    # Numbers below 2**63 have the same bytes with and without a sign.
    "u64": long_vector,
    "f64": double_vector,
    "bool": bool_vector,
}
_UNIONS = {"EValue": KERNEL_TYPES[1:], "Instruction": INSTRUCTION_ARGUMENTS[1:]}
_HOLDERS = {member: union for union, members in _UNIONS.items() for member in members}
# What makes a file right enough to be looked at as a whole.
_NUMBERS: Mapping[str, int] = {"AllocationDetails.memory_id": 1, "MoveCall.move_to": 0}
_ITEMS: Mapping[str, list[int]] = {
    "ExecutionPlan.non_const_buffer_sizes": [0, 8],
    "TensorList.items": [4],
    "OptionalTensorList.items": [-1],
    "IntList.items": [1],
    "KernelCall.args": [4, 4],
}
# Constants may be in the FlatBuffer or in a segment, not in both.
_LEFT_OUT = {"Program.constant_buffer", "Program.constant_segment"}


def of_schema() -> Iterator[tuple[str, Construction]]:
    """Yield a name and a construction for each list, text and run of bytes, in each form."""
    for tables, root in ((PROGRAM_TABLES, "Program"), (EXTERNAL_TABLES, "FlatTensor")):
        for table, fields in tables.items():
            for field in fields:
                if field.kind[0] != "[" and field.kind not in {"str", "bytes"}:
                    continue
                leaf = field.kind in {"str", "bytes"} or field.kind[1:-1] in SCALAR_CODES
                for form in FORMS if leaf else FORMS[:2]:
                    yield f"{table}.{field.name}-{form}", _construction(root, table, field, form)


def _construction(root: str, table: str, field: Field, form: str) -> Construction:
    def make(count: int) -> bytes:
        return _Builder(root, table, field, form, count).file()

    return make


class _Builder:
    """Writes one file: every field once, and the chosen one many times."""

    def __init__(self, root: str, table: str, field: Field, form: str, count: int) -> None:
        self._tables = PROGRAM_TABLES if root == "Program" else EXTERNAL_TABLES
        self._root = root
        self._heavy = f"{table}.{field.name}"
        self._form = form
        self._count = count
        self._repeated = "" if form == "long" else self._list_over(table)
        if form == "shared" and table == root:
            self._repeated = self._heavy
        start = 8 if root == "Program" else 56
        self._assembly = Assembly(self._tables, start=start, blob_alignment=4)
        self._texts = 0

    def file(self) -> bytes:
        """Return the file."""
        root = self._write(self._root)
        if self._root == "Program":
            return b"".join(self._assembly.finish(struct.pack("<I4s", root, b"ET12")))
        parts = self._assembly.finish(struct.pack("<I4s", root, b"FT01").ljust(56, b"\0"))
        data = bytearray(b"".join(parts))
        header = HEADER_MAGIC, HEADER_LENGTH, 48, len(data) - 48, len(data), 0
        data[8 : 8 + HEADER_LENGTH] = HEADER_STRUCT.pack(*header)
        return bytes(data)

    def _list_over(self, table: str) -> str:
        """Return the list of tables that is nearest above a table."""
        table = _HOLDERS.get(table, table)
        for parent, fields in self._tables.items():
            for field in fields:
                if field.kind == f"[{table}]":
                    return f"{parent}.{field.name}"
        parents = [p for p, fields in self._tables.items() if table in {f.kind for f in fields}]
        return self._list_over(parents[0]) if parents else ""

    def _write(self, table: str, member: str = "") -> int:
        """Write a table with all below it, and return its position."""
        values = {
            field.name: self._value(table, field, member)
            for field in self._tables[table]
            if f"{table}.{field.name}" not in _LEFT_OUT
            or f"{table}.{field.name}" in {self._heavy, self._repeated}
            or (field.kind == "[Buffer]" and self._heavy.startswith("Buffer."))
            or (field.kind == "SubsegmentOffsets" and self._heavy.startswith("Subsegment"))
        }
        skeleton = self._assembly.skeleton
        slots = skeleton.table(table, values)
        for field in self._tables[table]:
            if field.name not in slots:
                continue
            if field.kind == "union":
                position = self._write(member)
            elif field.kind[0] == "[":
                position = self._vector(table, field)
            else:
                position = self._write(field.kind)
            skeleton.patch(slots[field.name], position)
        return slots[""]

    def _value(self, table: str, field: Field, member: str) -> object:
        name, kind = f"{table}.{field.name}", field.kind
        if field.name in {"val_type", "instr_args_type"}:
            return _UNIONS[table].index(member) + 1
        if kind in SCALAR_CODES:
            return _NUMBERS.get(name, 0)
        heavy = name == self._heavy
        if kind in {"str", "bytes"}:
            self._texts += 1
            text = "x" * 4 * self._count if heavy else f"t{self._texts}"
            if kind == "str":
                return self._assembly.words.add_string(text)
            return self._assembly.words.add(struct.pack("<I", len(text)) + text.encode())
        if kind[1:-1] in _PACKERS:
            default = {"Tensor.sizes": [1], "TensorLayout.sizes": [0]}.get(name, [0])
            items = _ITEMS.get(name, default)
            pool = (
                self._assembly.longs
                if kind[1:-1] in {"i64", "u64", "f64"}
                else self._assembly.words
            )
            return pool.add(_PACKERS[kind[1:-1]](items * (self._count if heavy else 1)))
        return SLOT

    def _vector(self, table: str, field: Field) -> int:
        name, kind = f"{table}.{field.name}", field.kind[1:-1]
        members = _UNIONS.get(kind, ("",))
        # The heavy one first, as it is what a shared list leads to.
        members = tuple(sorted(members, key=lambda m: not self._heavy.startswith(f"{m}.")))
        if kind == "EValue" and self._repeated != name:
            members = _UNIONS[kind]
        count = self._count if name in {self._heavy, self._repeated} else len(members)
        position, slots = self._assembly.skeleton.vector(count)
        shared = name == self._repeated and self._form == "shared"
        first = 0
        for number, slot in enumerate(slots):
            if not (shared and first):
                one = name == self._repeated
                member = members[0] if one else members[number % len(members)]
                first = self._write(kind, member)
            self._assembly.skeleton.patch(slot, first)
        return position
