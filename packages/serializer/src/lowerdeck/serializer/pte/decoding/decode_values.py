"""Values of methods, decoded from their tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lowerdeck.serializer.errors import EnumError, MissingFieldError
from lowerdeck.serializer.flatbuffer.limits import MAX_RANK, OBJECT_COST
from lowerdeck.serializer.flatbuffer.tables import TableReader
from lowerdeck.serializer.flatbuffer.wire import KERNEL_TYPES
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import (
    DeviceType,
    ScalarType,
    TensorDataLocation,
    TensorShapeDynamism,
)

E = TypeVar("E")

SCALAR_TYPES = {int(member): member for member in ScalarType}
DYNAMISMS = {int(member): member for member in TensorShapeDynamism}
LOCATIONS = {int(member): member for member in TensorDataLocation}
DEVICES = {int(member): member for member in DeviceType}


def member(members: dict[int, E], number: int, field: str, position: int) -> E:
    """Return the member of an enumeration.

    Raises:
        EnumError: There is none of this number.
    """
    found = members.get(number)
    if found is None:
        raise EnumError(
            f"found {number}, expected one of {', '.join(map(repr, members.values()))}",
            field=field,
            offset=position,
        )
    return found


class ValueDecoder:
    """Makes EValues from positions of their tables."""

    def __init__(self, reader: TableReader) -> None:
        self._reader = reader
        self._evalue = reader.table("EValue")
        self._read_tensor = reader.table("Tensor")
        self._read_allocation = reader.table("AllocationDetails")
        self._kinds: tuple[Callable[[int], Any] | None, ...] = (
            None,
            self._null,
            self._int,
            self._bool,
            self._double,
            self._tensor,
            self._string,
            *(self._list_of(name) for name in KERNEL_TYPES[7:]),
        )

    def value(self, position: int) -> schema.EValue:
        """Return the EValue at ``position``."""
        number, val = self._evalue(position)
        kind = self._kinds[number] if number < len(self._kinds) else None
        if kind is None:
            raise EnumError(
                f"found kind {number}, expected 1 to {len(KERNEL_TYPES) - 1}",
                field="EValue.val_type",
                offset=position,
            )
        if not val:
            raise MissingFieldError("found no value", field="EValue.val", offset=position)
        self._reader.spend(OBJECT_COST, "EValue", position)
        return schema.EValue(kind(val))

    def _null(self, position: int) -> schema.Null:
        self._reader.fields("Null", position)
        return schema.Null()

    def _int(self, position: int) -> schema.Int:
        return schema.Int(*self._reader.fields("Int", position))

    def _bool(self, position: int) -> schema.Bool:
        return schema.Bool(bool(self._reader.fields("Bool", position)[0]))

    def _double(self, position: int) -> schema.Double:
        return schema.Double(float(self._reader.fields("Double", position)[0]))

    def _string(self, position: int) -> schema.String:
        (text,) = self._reader.fields("String", position)
        return schema.String(self._reader.string(text, "String.string_val"))

    def _list_of(self, name: str) -> Callable[[int], Any]:
        reader, made, read = self._reader, getattr(schema, name), self._reader.table(name)
        kind = {"IntList": "i64", "DoubleList": "f64", "BoolList": "bool"}.get(name, "i32")
        field = f"{name}.items"

        def decode(position: int) -> Any:
            (items,) = read(position)
            if not items:
                raise MissingFieldError("found no vector", field=field, offset=position)
            return made(reader.scalars(items, kind, field))

        return decode

    def _tensor(self, position: int) -> schema.Tensor:
        reader = self._reader
        (
            scalar_type,
            storage_offset,
            sizes,
            dim_order,
            requires_grad,
            data_buffer_idx,
            allocation,
            layout,
            dynamism,
            extra,
        ) = self._read_tensor(position)
        if not (sizes and dim_order):
            field = "Tensor.dim_order" if sizes else "Tensor.sizes"
            raise MissingFieldError("found no vector", field=field, offset=position)
        reader.spend(OBJECT_COST, "Tensor", position)
        return schema.Tensor(
            SCALAR_TYPES.get(scalar_type)
            or member(SCALAR_TYPES, scalar_type, "Tensor.scalar_type", position),
            storage_offset,
            reader.scalars(sizes, "i32", "Tensor.sizes", MAX_RANK),
            reader.scalars(dim_order, "u8", "Tensor.dim_order", MAX_RANK),
            bool(requires_grad),
            data_buffer_idx,
            schema.AllocationDetails(*self._read_allocation(allocation)) if allocation else None,
            layout,
            member(DYNAMISMS, dynamism, "Tensor.shape_dynamism", position),
            self._extra(extra) if extra else None,
        )

    def _extra(self, position: int) -> schema.ExtraTensorInfo:
        reader = self._reader
        index, name, location, device, device_index = reader.fields("ExtraTensorInfo", position)
        what = "ExtraTensorInfo"
        reader.spend(OBJECT_COST, what, position)
        return schema.ExtraTensorInfo(
            index,
            reader.string(name, f"{what}.fully_qualified_name") if name else None,
            member(LOCATIONS, location, f"{what}.location", position),
            member(DEVICES, device, f"{what}.device_type", position),
            device_index,
        )
