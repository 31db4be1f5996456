"""The schema in its three forms: the classes, the tables of the wire, and the `.fbs` files."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from importlib import resources

import pytest

import lowerdeck.serializer as front
from lowerdeck.serializer.flatbuffer import wire

_KINDS = {
    "ubyte": "u8",
    "byte": "i8",
    "bool": "bool",
    "int": "i32",
    "uint": "u32",
    "long": "i64",
    "ulong": "u64",
    "double": "f64",
    "string": "str",
    "KernelTypes": "union",
    "ValueUnion": "union",
    "InstructionArguments": "union",
}
_ENUMS = ("ScalarType", "TensorShapeDynamism", "TensorDataLocation", "DataLocation", "DeviceType")
# What only cuts a file into segments is in no class, and what a class holds instead.
_OF_THE_FILE = {
    "Program": {"segments", "constant_segment", "mutable_data_segments"},
    "NamedData": {"segment_index"},
}
_OF_THE_CLASS = {"Program": {"mutable_data", "layout"}, "NamedData": {"data", "alignment"}}


def _text(name: str) -> str:
    path = resources.files("lowerdeck.serializer") / "fbs" / name
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


def _tables(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return the fields of each table as the wire sees them: a union is two fields."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, body in re.findall(r"table (\w+) \{(.*?)\}", text, re.DOTALL):
        fields: list[tuple[str, str]] = []
        for field, kind in re.findall(r"(\w+): ([\w\[\]]+)[^;]*;", body):
            if _KINDS.get(kind) == "union":
                fields.append((f"{field}_type", "u8"))
            fields.append((field, _kind(kind, field)))
        found[name] = fields
    return found


def _kind(kind: str, field: str) -> str:
    if kind == "[ubyte]":
        return "[u8]" if field == "dim_order" else "bytes"
    if kind in _ENUMS:
        return "i8"
    inner = kind.strip("[]")
    return kind.replace(inner, _KINDS.get(inner, inner))


@pytest.mark.parametrize(
    ("file", "tables"),
    [
        ("program.fbs", wire.PROGRAM_TABLES),
        ("flat_tensor.fbs", wire.EXTERNAL_TABLES),
        ("bundled_program.fbs", wire.BUNDLE_TABLES),
    ],
)
def test_fbs_and_wire_agree(file: str, tables: Mapping[str, tuple[wire.Field, ...]]) -> None:
    expected = {name: [tuple(field) for field in fields] for name, fields in tables.items()}
    assert _tables(_text(file)) == expected


@pytest.mark.parametrize("name", wire.PROGRAM_TABLES)
def test_classes_and_wire_agree(name: str) -> None:
    of_class = {field.name for field in dataclasses.fields(getattr(front, name))}
    kinds = wire.PROGRAM_TABLES[name]
    unions = {"EValue": {"val_type"}, "Instruction": {"instr_args_type"}}
    of_wire = (
        {field.name for field in kinds} - unions.get(name, set()) - _OF_THE_FILE.get(name, set())
    )
    assert of_class - _OF_THE_CLASS.get(name, set()) == of_wire


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("program.fbs", name) for name in _ENUMS),
        ("flat_tensor.fbs", "ScalarType"),
        ("bundled_program.fbs", "ScalarType"),
    ],
)
def test_enumerations_agree(file: str, name: str) -> None:
    (body,) = re.findall(rf"enum {name} : byte \{{(.*?)\}}", _text(file), re.DOTALL)
    members = {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", body)}
    assert members == {member.name: int(member) for member in getattr(front, name)}


@pytest.mark.parametrize(
    ("file", "name", "members"),
    [
        ("program.fbs", "KernelTypes", wire.KERNEL_TYPES),
        ("program.fbs", "InstructionArguments", wire.INSTRUCTION_ARGUMENTS),
        ("bundled_program.fbs", "ValueUnion", wire.BUNDLED_VALUES),
    ],
)
def test_unions_agree(file: str, name: str, members: tuple[str, ...]) -> None:
    (body,) = re.findall(rf"union {name} \{{(.*?)\}}", _text(file), re.DOTALL)
    assert ("NONE", *re.findall(r"\w+", body)) == members


def test_importing_reads_no_part_that_writing_and_reading_never_need() -> None:
    code = """
        import sys
        import lowerdeck.serializer as serializer

        def loaded():
            return {name.split(".")[2] for name in sys.modules if name.startswith(f"{package}.")}

        package = "lowerdeck.serializer"
        later = {"kernels", "verify", "xnnpack"}
        assert not loaded() & later, sorted(loaded() & later)
        assert set(serializer.__all__) <= set(dir(serializer))
        for name in serializer.__all__:
            getattr(serializer, name)
        assert later <= loaded()
        assert set(serializer.__all__) <= set(vars(serializer))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
