"""What is wrong with a field of a program that should be written, told by its path.

Writing packs thousands of fields at once and does not know which of them a bad number came from,
and some bad values pack without a word (None where a zero is left out, a text as a truth value).
So the types of all fields are looked at first, in loops of the interpreter's own; only where that
or the packing fails is every field checked by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum
from itertools import groupby
from operator import attrgetter
from typing import Any

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import quoted, shown
from lowerdeck.serializer.flatbuffer.limits import MAX_RANK
from lowerdeck.serializer.flatbuffer.storage import FileRange, byte_view
from lowerdeck.serializer.flatbuffer.wire import (
    EXTERNAL_TABLES,
    INSTRUCTION_ARGUMENTS,
    KERNEL_TYPES,
)
from lowerdeck.serializer.flatbuffer.wire import PROGRAM_TABLES as TABLES
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import (
    DataLocation,
    DeviceType,
    ScalarType,
    TensorDataLocation,
    TensorShapeDynamism,
)

_RANGES = {
    "u8": (0, 255),
    "i8": (-128, 127),
    "i32": (-(2**31), 2**31 - 1),
    "u32": (0, 2**32 - 1),
    "i64": (-(2**63), 2**63 - 1),
    "u64": (0, 2**64 - 1),
}
_ENUMS: dict[str, type[IntEnum]] = {
    "Tensor.scalar_type": ScalarType,
    "Tensor.shape_dynamism": TensorShapeDynamism,
    "TensorLayout.scalar_type": ScalarType,
    "ExtraTensorInfo.location": TensorDataLocation,
    "ExtraTensorInfo.device_type": DeviceType,
    "NonConstBufferDevice.device_type": DeviceType,
    "BackendDelegateDataReference.location": DataLocation,
}
_OPTIONAL = {
    "ExecutionPlan.container_meta_type",
    "ExecutionPlan.non_const_buffer_device",
    "Tensor.allocation_info",
    "Tensor.extra_tensor_info",
    "ExtraTensorInfo.fully_qualified_name",
    "Chain.stacktrace",
    "ExternalEntry.tensor_layout",
}
_RANKED = {"Tensor.sizes", "Tensor.dim_order", "TensorLayout.sizes", "TensorLayout.dim_order"}
# Anything packs as a truth value, and what a list holds is not told by the type of a field.
_BY_CONTENT = {schema.BoolList}
# Classes that stand for more than one table of the file, or for none.
_LOGICAL = {
    "Program": {
        "version": "u32",
        "execution_plan": "[ExecutionPlan]",
        "constant_buffer": "[Buffer]",
        "mutable_data": "[Buffer]",
        "backend_delegate_data": "[BackendDelegateInlineData]",
        "named_data": "[NamedData]",
    },
    "NamedData": {"key": "str", "data": "bytes", "alignment": "i64"},
    "ExternalEntry": {"data": "bytes", "tensor_layout": "TensorLayout", "alignment": "i64"},
    "TensorLayout": {field.name: field.kind for field in EXTERNAL_TABLES["TensorLayout"]},
}
_NAMES: dict[str, Callable[[Any], str]] = {"ExecutionPlan": lambda plan: plan.name}


def _kinds(name: str) -> dict[str, str]:
    kinds = _LOGICAL.get(name) or {field.name: field.kind for field in TABLES[name]}
    # The number of a union's member is told by its class.
    return {
        key: kind for key, kind in kinds.items() if not key.endswith(("val_type", "args_type"))
    }


class TypeCheck:
    """Sees whether the fields of all objects have types that were right before.

    Objects of a class are looked at together, field by field, so that the interpreter's own loops
    do it; each different row of types is then judged once, by one object that has it.
    """

    def __init__(self) -> None:
        self._readers: dict[type, list[Callable[[Any], object]]] = {}
        self._right: dict[type, set[tuple[type, ...]]] = {}

    def right(self, program: schema.Program) -> bool:
        """Return whether no field has a type that needs a closer look.

        Args:
            program: The program.
        """
        try:
            return all(self._alike(items, kind) for items, kind in _groups(program) if items)
        except (AttributeError, TypeError):
            return False

    def _alike(self, items: Sequence[Any], expected: type) -> bool:
        """Return whether all items are of one class, with fields that are right."""
        if {*map(type, items)} != {expected}:
            return False
        read = self._readers.get(expected)
        if read is None:
            if not is_dataclass(expected) or expected.__module__ != schema.__name__:
                return False
            read = self._readers[expected] = [attrgetter(each.name) for each in fields(expected)]
            self._right[expected] = set()
        right = self._right[expected]
        for example in _examples(items, read):
            types = tuple(type(get(example)) for get in read)
            if types in right:
                continue
            if not any(issubclass(each, IntEnum) for each in types) and _has_enum(expected):
                # Plain numbers as members: each may be another one.
                if any(map(_is_wrong, items)):
                    return False
            elif _is_wrong(example):
                return False
            right.add(types)
        return expected not in _BY_CONTENT or not any(map(_is_wrong, items))


def _examples(items: Sequence[Any], read: Sequence[Callable[[Any], object]]) -> Collection[Any]:
    """Return an item for each row of types that their fields have."""
    varying = [get for get in read if len({*map(type, map(get, items))}) > 1]
    if not varying:
        return items[:1]
    columns = [map(type, map(get, items)) for get in varying]
    return dict(zip(zip(*columns, strict=True), items, strict=True)).values()


def check_program(program: schema.Program) -> None:
    """Raise for the first field that no file can hold; return if there is none.

    Args:
        program: The program.

    Raises:
        ProgramError: A field has a wrong type or is out of range; the message names it.
    """
    _raise(_first_problem(program, "Program"))


def check_external(data: Any) -> None:
    """Raise for the first field of external data that no file can hold.

    Args:
        data: The external data.

    Raises:
        ProgramError: A field has a wrong type or is out of range; the message names it.
    """
    problem = _scalar_problem(data.version, "u32", ranges=True)
    _raise(f"version{problem}" if problem else "")
    if not isinstance(data.entries, dict):
        raise ProgramError(f"entries: found {shown(data.entries)}, expected a dict of entries")
    for key, entry in data.entries.items():
        problem = _scalar_problem(key, "str", ranges=True)
        _raise(f"key of external data{problem}" if problem else "")
        problem = _first_problem(entry, "ExternalEntry")
        dot = "" if problem[:1] == ":" else "."
        _raise(f"entries: external data {quoted(key)}{dot}{problem}" if problem else "")


def _is_wrong(item: object) -> bool:
    return bool(_first_problem(item, type(item).__name__, deep=False, ranges=False))


def _has_enum(kind: type) -> bool:
    return any(name.startswith(f"{kind.__name__}.") for name in _ENUMS)


def _groups(program: schema.Program) -> Iterator[tuple[Sequence[Any], type]]:
    """Yield the objects that have fields of their own, with the class that they should have."""
    yield [program], schema.Program
    yield program.constant_buffer, schema.Buffer
    yield program.mutable_data, schema.Buffer
    yield program.backend_delegate_data, schema.BackendDelegateInlineData
    yield program.named_data, schema.NamedData
    for plan in program.execution_plan:
        yield [plan], schema.ExecutionPlan
        if plan.container_meta_type is not None:
            yield [plan.container_meta_type], schema.ContainerMetadata
        yield from _values(plan.values)
        yield plan.chains, schema.Chain
        for chain in plan.chains:
            yield chain.instructions, schema.Instruction
            yield from _by_class([step.instr_args for step in chain.instructions])
            traces = chain.stacktrace or ()
            yield traces, schema.FrameList
            yield [frame for trace in traces for frame in trace.items], schema.Frame
        yield plan.delegates, schema.BackendDelegate
        yield [each.processed for each in plan.delegates], schema.BackendDelegateDataReference
        specs = [spec for each in plan.delegates for spec in each.compile_specs]
        yield specs, schema.CompileSpec
        yield plan.operators, schema.Operator
        yield plan.non_const_buffer_device or (), schema.NonConstBufferDevice


def _values(values: Sequence[schema.EValue]) -> Iterator[tuple[Sequence[Any], type]]:
    yield values, schema.EValue
    for items, kind in _by_class([value.val for value in values]):
        yield items, kind
        if kind is schema.Tensor:
            planned = [tensor.allocation_info for tensor in items]
            yield [each for each in planned if each is not None], schema.AllocationDetails
            extra = [tensor.extra_tensor_info for tensor in items]
            yield [each for each in extra if each is not None], schema.ExtraTensorInfo


def _by_class(members: list[Any]) -> Iterator[tuple[list[Any], type]]:
    """Yield the members of a union, class by class."""
    found: dict[type, list[Any]] = {}
    for kind, run in groupby(members, type):
        found.setdefault(kind, []).extend(run)
    yield from ((items, kind) for kind, items in found.items())


def _first_problem(item: object, name: str, *, deep: bool = True, ranges: bool = True) -> str:
    """Return the path of the first wrong field with what is wrong, or ``""``.

    Args:
        item: The object.
        name: Name of the class that it must be of.
        deep: Whether to look into the objects that it holds.
        ranges: Whether to look at every number, and not only at its type.
    """
    if type(item).__name__ != name or not is_dataclass(item):
        return f": found {shown(item)}, expected a {name}"
    for field, kind in _kinds(name).items():
        problem = _problem(getattr(item, field), kind, f"{name}.{field}", deep, ranges)
        if problem:
            return f"{field}{problem}"
    return ""


def _problem(value: Any, kind: str, name: str, deep: bool, ranges: bool) -> str:
    if value is None and name in _OPTIONAL:
        return ""
    if name in _ENUMS:
        return _enum_problem(value, _ENUMS[name])
    if kind in {"str", "bytes", "bool", "f64"} or kind in _RANGES:
        return _scalar_problem(value, kind, ranges)
    if kind == "union":
        return _union_problem(value, name, deep, ranges)
    if kind[0] == "[":
        return _list_problem(value, kind[1:-1], name, deep, ranges)
    if not deep:
        right = type(value).__name__ == kind
        return "" if right else f": found {shown(value)}, expected a {kind}"
    problem = _first_problem(value, kind)
    return f"{'' if problem[:1] == ':' else '.'}{problem}" if problem else ""


def _enum_problem(value: object, members: type[IntEnum]) -> str:
    if isinstance(value, int) and value in members.__members__.values():
        return ""
    return f": found {shown(value)}, expected a member of {members.__name__}"


def _scalar_problem(value: Any, kind: str, ranges: bool) -> str:
    if kind in _RANGES:
        least, most = _RANGES[kind]
        if not isinstance(value, int):
            return f": found {shown(value)}, expected a whole number"
        if ranges and not least <= value <= most:
            return f": found {shown(value)}, expected {least} to {most}"
    elif kind == "bool":
        if not isinstance(value, bool):
            return f": found {shown(value)}, expected True or False"
    elif kind == "f64":
        if not isinstance(value, int | float):
            return f": found {shown(value)}, expected a number"
        if ranges and isinstance(value, int) and abs(value) > 2**1023:
            return f": found {shown(value)}, expected a number that a double holds"
    elif kind == "str":
        if not isinstance(value, str):
            return f": found {shown(value)}, expected a text"
        if ranges and any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
            return f": found {quoted(value)}, expected text that UTF-8 can say, no surrogates"
    elif not isinstance(value, FileRange):
        try:
            byte_view(value, "")
        except ProgramError as error:
            return str(error)
    return ""


def _union_problem(value: object, name: str, deep: bool, ranges: bool) -> str:
    members = KERNEL_TYPES if name.startswith("EValue") else INSTRUCTION_ARGUMENTS
    kind = type(value).__name__
    if kind not in members[1:] or type(value) is not getattr(schema, kind):
        return f": found {shown(value)}, expected one of {', '.join(members[1:])}"
    problem = _first_problem(value, kind, ranges=ranges) if deep else ""
    return f"{'' if problem[:1] == ':' else '.'}{problem}" if problem else ""


def _list_problem(value: Any, kind: str, name: str, deep: bool, ranges: bool) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        return f": found {shown(value)}, expected a list"
    if name in _RANKED and len(value) > MAX_RANK:
        return f": found {len(value)} dimensions, expected at most {MAX_RANK}"
    if not deep and kind != "bool":
        return ""
    for index, item in enumerate(value):
        where = f"[{index}]"
        if kind in _NAMES and type(item).__name__ == kind and isinstance(item.name, str):
            where = f"[{index}] (method {quoted(item.name)})"
        problem = _problem(item, kind, f"{name}[]", deep, ranges)
        if problem:
            return f"{where}{problem}"
    return ""


def _raise(problem: str) -> None:
    if problem:
        raise ProgramError(problem.removeprefix(": "))
