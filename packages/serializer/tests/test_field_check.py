"""Whatever value is in whatever field, the writer says which field it is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck.serializer.pte import schema
from lowerdeck_files.programs import add_delegates, add_program


class _Nothing:
    """Something that no field takes."""


_VALUES: tuple[object, ...] = (
    *(None, "text", "\ud800", b"bytes", True, -1, 0, 1.5, math.nan, math.inf, -math.inf),
    *(2**7, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**5000, [], [None], ["x"], [2**70]),
    *([math.nan], [-(2**40)], [True] * 17, {}, {"a": 1}, (), {1}, _Nothing(), _Nothing),
    *([_Nothing()], pte.ScalarType.FLOAT, pte.DataLocation.SEGMENT, pte.Null(), [pte.Null()]),
    *(pte.EValue(pte.Null()), pte.Buffer(b"")),
)


def _full() -> pte.Program:
    """Return a program that uses every class of the schema."""
    program: pte.Program = add_delegates(add_program(), b"blob", specs=[("k", b"v")])
    plan = program.execution_plan[0]
    plan.values[1].val.extra_tensor_info = pte.ExtraTensorInfo(1, "weight")  # type: ignore[union-attr]
    kinds = (pte.Null(), pte.Bool(True), pte.Double(0.5), pte.String("s"), pte.IntList([2]))
    lists = (pte.DoubleList([1.5]), pte.BoolList([True]), pte.TensorList([0]))
    values = (*kinds, *lists, pte.OptionalTensorList([-1]))
    plan.values += [pte.EValue(value) for value in values]
    calls = (
        pte.DelegateCall(0, [0]),
        pte.MoveCall(0, 3),
        pte.JumpFalseCall(5, 0),
        pte.FreeCall(0),
    )
    plan.chains[0].instructions += [pte.Instruction(call) for call in calls]
    plan.chains[0].stacktrace = [pte.FrameList([pte.Frame("f", 1, "g", "h")])]
    plan.non_const_buffer_device = [pte.NonConstBufferDevice(1)]
    program.mutable_data.append(pte.Buffer(b"1234"))
    program.named_data = [pte.NamedData("key", b"named", 16)]
    program.layout = pte.FileLayout()
    return program


def _paths(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to each field of each object, and to each entry of each list."""
    if is_dataclass(item):
        for field in fields(item):
            yield (*path, field.name)
            yield from _paths(getattr(item, field.name), (*path, field.name))
    elif isinstance(item, list):
        for index, entry in enumerate(item):
            yield (*path, index)
            yield from _paths(entry, (*path, index))
    elif isinstance(item, dict):
        for key, entry in item.items():
            yield from _paths(entry, (*path, key))


def _put(item: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a copy in which one field has another value."""
    copied = copy.deepcopy(item)
    owner = copied
    for step in path[:-1]:
        owner = owner[step] if isinstance(owner, list | dict) else getattr(owner, str(step))
    if isinstance(owner, list | dict):
        owner[path[-1]] = value
    elif owner.__dataclass_params__.frozen:
        object.__setattr__(owner, str(path[-1]), value)
    else:
        setattr(owner, str(path[-1]), value)
    return copied


_PROGRAM, _DATA = (
    _full(),
    pte.ExternalData(
        {"key": pte.ExternalEntry(b"1234", pte.TensorLayout(pte.ScalarType.FLOAT, [1], [0]), 16)}
    ),
)


def test_every_class_of_the_schema_is_in_the_program() -> None:
    seen = {type(_at(path)).__name__ for path in _paths(_PROGRAM)}
    classes = {name for name, kind in vars(schema).items() if is_dataclass(kind)}
    classes -= {"FileRange"}
    assert classes - seen - {"Program", "DataSegment", "SubsegmentOffsets"} == set()


def _at(path: tuple[Any, ...]) -> object:
    item: Any = _PROGRAM
    for step in path:
        item = item[step] if isinstance(step, int) else getattr(item, str(step))
    return item


CASES: list[tuple[Any, Callable[[Any], bytes], Callable[[bytes], object], tuple[Any, ...]]] = [
    *((_PROGRAM, pte.serialize_pte, pte.deserialize_pte, path) for path in _paths(_PROGRAM)),
    *((_DATA, pte.serialize_ptd, pte.deserialize_ptd, path) for path in _paths(_DATA)),
]


@pytest.mark.parametrize(("whole", "write", "read", "path"), CASES)
def test_a_wrong_field_is_named(
    whole: Any,
    write: Callable[[Any], bytes],
    read: Callable[[bytes], object],
    path: tuple[Any, ...],
) -> None:
    name = next(step for step in reversed(path) if isinstance(step, str))
    for value in _VALUES:
        try:
            data = write(_put(whole, path, value))
        except pte.ProgramError as error:
            told = str(error)
            assert name in told
            assert len(told) < 1000
        else:
            # Nothing was taken for something else. Numbers that contradict each other (the index
            # of a constant that is not there) are the verifier's business, and are refused.
            assert whole is _DATA or _same_kind(value, _at(path))
            with suppress(pte.FormatError):
                read(data)


def _same_kind(value: object, was: object) -> bool:
    """Return whether a value may be where another was; fail if it may not."""
    free = isinstance(was, schema.EValue) or was is None or value is None
    members = (pte.Null, schema.Int, schema.Tensor, pte.Bool)
    kinds = (
        isinstance(value, type(was)),
        isinstance(value, bool | IntEnum | int)
        and isinstance(was, int)
        and not isinstance(was, bool),
        isinstance(value, int) and isinstance(was, float),
        isinstance(value, list | tuple | bytes | bytearray) and isinstance(was, list | bytes),
        isinstance(value, members) and is_dataclass(was),
        isinstance(value, bytes) and isinstance(was, memoryview),
    )
    assert free or any(kinds), f"wrote {value!r} where {was!r} was"
    return True


@pytest.mark.parametrize("value", ["16", 1.5, math.nan, 0, -1, 24, 2**31, 2**70, [16], None, b"k"])
def test_a_wrong_option_or_key_is_named(value: Any) -> None:
    for option in ("segment_alignment", "constant_tensor_alignment", "delegate_alignment"):
        if value is None or (value, option) == (24, "segment_alignment"):
            continue
        with pytest.raises(pte.ProgramError, match=f"{option}: found|{option}.*expected 1 to"):
            pte.serialize_pte(add_program(), **{option: value})
    if not isinstance(value, str):
        with pytest.raises(pte.ProgramError, match="key"):
            pte.serialize_ptd({value if value != [16] else "\ud800": pte.ExternalEntry(b"1234")})


def _located(number: int) -> Any:
    extra = pte.ExtraTensorInfo(location=number)  # type: ignore[arg-type]
    return pte.Tensor(pte.ScalarType.FLOAT, extra_tensor_info=extra)


NO_BOOLS: list[Any] = ["x", None, 2.0]


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        *(
            (pte.BoolList([True]), pte.BoolList([True, one]), r"items\[1\].*expected True or F")
            for one in NO_BOOLS
        ),
        (_located(1), _located(99), "location: found 99"),
    ],
)
def test_a_wrong_entry_is_found_behind_right_ones(right: Any, wrong: Any, told: str) -> None:
    program = _full()
    program.execution_plan[0].values += [pte.EValue(right), pte.EValue(wrong)]
    with pytest.raises(pte.ProgramError, match=told):
        pte.serialize_pte(program)
