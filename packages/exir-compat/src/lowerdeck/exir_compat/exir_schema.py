"""Convert programs to the classes of ``executorch.exir.schema``."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any

from lowerdeck.exir_compat._executorch import file_classes
from lowerdeck.serializer import Program


def to_exir_classes(program: Any) -> Any:
    """Return a program, or a part of it, in exir's classes if exir is imported, else unchanged.

    exir's printer and writer require these classes.
    """
    schema = file_classes()
    if schema is None:
        return program
    if not isinstance(program, Program):
        return _converted(program, schema)
    return schema.Program(
        version=program.version,
        execution_plan=_converted(program.execution_plan, schema),
        constant_buffer=_converted(program.constant_buffer, schema),
        backend_delegate_data=_converted(program.backend_delegate_data, schema),
        segments=[],
        constant_segment=schema.SubsegmentOffsets(segment_index=0, offsets=[]),
        mutable_data_segments=None,
        named_data=[],
    )


def _converted(value: Any, schema: Any) -> Any:
    """Return a value in exir's classes."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None), bytes):
        return value
    if kind is list:
        return [_converted(item, schema) for item in value]
    if issubclass(kind, IntEnum):
        return getattr(schema, kind.__name__)(int(value))
    if is_dataclass(kind):
        values = {field_.name: getattr(value, field_.name) for field_ in fields(kind)}
        return getattr(schema, kind.__name__)(
            **{name: _converted(item, schema) for name, item in values.items()}
        )
    return as_bytes(value)


def as_bytes(storage: Any) -> bytes:
    """Return a buffer as ``bytes``, which exir's classes require; other types are copied."""
    return storage if isinstance(storage, bytes) else bytes(storage)
