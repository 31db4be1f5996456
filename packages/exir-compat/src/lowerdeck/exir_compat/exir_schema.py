"""Programs in the classes of ``executorch.exir.schema``, for tools that ask for those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any

from lowerdeck.exir_compat._executorch import compile_spec_class, file_classes
from lowerdeck.serializer import Buffer, CompileSpec, Double, Program

_Made = Callable[[Any], Any]


def in_exirs_classes(program: Program) -> Any:
    """Return a program in exir's own classes where anyone has imported them, else itself.

    Code that asks ``isinstance`` for a class of exir has imported it, and exir's own tools, such
    as its printer and its writer, do ask.

    Args:
        program: The program; it is not changed, and bytes are shared where they are bytes.
    """
    schema = file_classes()
    if schema is None:
        return program
    conversion = _Conversion(schema)
    return schema.Program(
        version=program.version,
        execution_plan=conversion.of(program.execution_plan),
        constant_buffer=conversion.of(program.constant_buffer),
        backend_delegate_data=conversion.of(program.backend_delegate_data),
        segments=[],
        constant_segment=schema.SubsegmentOffsets(segment_index=0, offsets=[]),
        mutable_data_segments=None,
        named_data=[],
    )


def buffers_in_exirs_classes(buffers: list[Buffer]) -> list[Any]:
    """Return initial values of state as exir's emitter does, as they are where it is not loaded.

    Args:
        buffers: The values; entry 0 is reserved.
    """
    schema = file_classes()
    return buffers if schema is None else list(_Conversion(schema).of(buffers))


class _Conversion:
    """What becomes of an object of each class; looked up once for each class."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._ways: dict[type, _Made] = {}

    def of(self, value: Any) -> Any:
        """Return a value of our schema in the other one's classes."""
        kind = type(value)
        if kind is list:
            return [self.of(item) for item in value]
        way = self._ways.get(kind)
        if way is None:
            way = self._ways[kind] = self._way(kind)
        return way(value)

    def _way(self, kind: type) -> _Made:
        if issubclass(kind, IntEnum):
            enum = getattr(self._schema, kind.__name__)
            return lambda value: enum(int(value))
        if kind is CompileSpec:
            spec = compile_spec_class()
            return lambda value: spec(value.key, as_bytes(value.value))
        if kind is Double:
            return lambda value: self._schema.Double(double_val=value.double_val)
        if is_dataclass(kind):
            cls = getattr(self._schema, kind.__name__)
            names = tuple(field_.name for field_ in fields(kind))
            return lambda value: cls(**{name: self.of(getattr(value, name)) for name in names})
        if kind in (str, int, float, bool, type(None), bytes):
            return lambda value: value
        return as_bytes


def as_bytes(storage: Any) -> bytes:
    """Return bytes as exir's classes hold them: memory that we only point at is copied."""
    return storage if isinstance(storage, bytes) else bytes(storage)
