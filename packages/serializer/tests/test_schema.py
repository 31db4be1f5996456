"""The schema in its two forms: the classes and the `.fbs` files."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap
from importlib import resources

import pytest

import lowerdeck.serializer as front
from lowerdeck.serializer.pte.schema import PROGRAM_FORMAT

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


def test_a_schema_is_read_with_its_attributes() -> None:
    fields = {field.name: field for field in PROGRAM_FORMAT.tables["Tensor"]}
    assert (fields["sizes"].kind, fields["sizes"].most, fields["sizes"].is_required) == (
        "[i32]",
        16,
        True,
    )
    assert (fields["dim_order"].kind, fields["scalar_type"].of) == ("[u8]", "ScalarType")
    assert [(field.name, field.kind) for field in PROGRAM_FORMAT.tables["EValue"]] == [
        ("val_type", "u8"),
        ("val", "union"),
    ]
    assert PROGRAM_FORMAT.tables["Buffer"][0].is_aligned
    assert PROGRAM_FORMAT.unions["KernelTypes"][5] == "Tensor"


@pytest.mark.parametrize("name", PROGRAM_FORMAT.tables)
def test_classes_and_tables_agree(name: str) -> None:
    of_class = {field.name for field in dataclasses.fields(getattr(front, name))}
    kinds = PROGRAM_FORMAT.tables[name]
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
