"""Find the first field that cannot be written.

The writer packs whole columns, so its errors do not identify the object. Fields are checked one by
one only after an error, to name the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from lowerdeck.serializer.errors import ProgramError
from lowerdeck.serializer.escaping import quoted, shown
from lowerdeck.serializer.flatbuffer.storage import FileRange, byte_view
from lowerdeck.serializer.flatbuffer.wire import SCALAR_SIZES, Field, Format


def refuse(form: Format, item: Any, name: str, cause: Exception) -> NoReturn:
    """Raise an error that names the first invalid field of an object.

    Args:
        form: Format that defines the object's class.
        item: The object, or a dictionary if the table has no class.
        name: Name of the object's table.
        cause: The writer's error, raised if no field is invalid.

    Raises:
        ProgramError: A field has a wrong type or is out of range; the message names it.
    """
    problem = first_problem(form, item, name)
    if problem:
        raise ProgramError(problem.removeprefix(": ").removeprefix(".")) from cause
    raise cause


def first_problem(form: Format, item: Any, name: str) -> str:
    """Return the path and problem of the first invalid field, or ``""``.

    Args:
        form: Format that defines the object's class.
        item: The object, or a dictionary if the table has no class.
        name: Name of the object's table.
    """
    kind: type = form.classes.get(name, dict)
    if type(item) is not kind:
        return f": found {shown(item)}, expected a {name}"
    for field in form.tables[name]:
        if field.of in form.unions and not field.is_offset:
            continue  # derived from the class of the union's member
        if isinstance(item, dict):
            value = item.get(field.name, None if field.is_offset else 0)
        else:
            value = getattr(item, field.name)
        is_absent = value is None and field.is_offset and form.may_miss(name, field)
        problem = "" if is_absent else _problem(form, field, value)
        if problem:
            return f".{field.name}{problem}"
    return ""


def _problem(form: Format, field: Field, value: Any) -> str:
    if field.kind == "union":
        names = form.unions[field.of][1:]
        kind = form.names.get(type(value), "")
        if kind not in names:
            return f": found {shown(value)}, expected one of {', '.join(names)}"
        return first_problem(form, value, kind)
    if field.of:
        if isinstance(value, int) and value in form.members(field.of).values():
            return ""
        return f": found {shown(value)}, expected a member of {field.of}"
    if field.item:
        return _list_problem(form, field, value)
    if field.kind in form.tables:
        return first_problem(form, value, field.kind)
    return _plain_problem(field.kind, value)


def _list_problem(form: Format, field: Field, value: Any) -> str:
    if not is_list(value):
        return f": found {shown(value)}, expected a list"
    if field.most and len(value) > field.most:
        return f": found {len(value)} dimensions, expected at most {field.most}"
    entry = Field(field.name, field.item)
    for index, item in enumerate(value):
        problem = _problem(form, entry, item)
        if problem:
            is_method = field.item == "ExecutionPlan" and isinstance(
                item, form.classes[field.item]
            )
            which = f" (method {shown(item.name)})" if is_method else ""
            return f"[{index}]{which}{problem}"
    return ""


def _plain_problem(kind: str, value: Any) -> str:
    if kind == "bool":
        return "" if isinstance(value, bool) else f": found {shown(value)}, expected True or False"
    if kind == "f64":
        if not isinstance(value, int | float):
            return f": found {shown(value)}, expected a number"
        if isinstance(value, int) and abs(value) > 2**1023:
            return f": found {shown(value)}, expected a number in the range of a double"
    elif kind == "str":
        if not isinstance(value, str):
            return f": found {shown(value)}, expected a string"
        if any(0xD800 <= ord(letter) <= 0xDFFF for letter in value):
            return f": found {quoted(value)}, expected text that UTF-8 can encode"
    elif kind == "bytes":
        if not isinstance(value, FileRange):
            try:
                byte_view(value, "")
            except ProgramError as error:
                return str(error)
    elif not isinstance(value, int):
        return f": found {shown(value)}, expected an integer"
    else:
        count = 1 << 8 * SCALAR_SIZES[kind]
        least = 0 if kind[0] == "u" else -count // 2
        if not least <= value < least + count:
            return f": found {shown(value)}, expected {least} to {least + count - 1}"
    return ""


def is_list(value: object) -> bool:
    """Return whether a value is a sequence that is neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
