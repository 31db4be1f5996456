"""Decode untrusted FlatBuffer tables to objects, driven by field descriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import cache
from operator import itemgetter
from typing import Any, NoReturn, TypeVar

from lowerdeck.serializer.errors import ContentError, FormatError, MissingFieldError
from lowerdeck.serializer.flatbuffer.tables import TableReader
from lowerdeck.serializer.flatbuffer.wire import SCALAR_CODES, Field, Format

_K = TypeVar("_K")
_V = TypeVar("_V")
_Step = Callable[[Any], Any]


class ObjectReader:
    """Decoder from tables to objects of a format's classes."""

    def __init__(self, data: memoryview, form: Format, *, strict: bool = False) -> None:
        """Create a reader of one FlatBuffer.

        Args:
            form: Tables and classes of the FlatBuffer.
            strict: As for :class:`TableReader`.
        """
        self.tables: TableReader = TableReader(data, form.tables, strict=strict)
        self._form = form
        self._makers: _Lazy[str, Callable[[int], Any]] = _Lazy(self._new_maker)

    def object_at(self, position: int, name: str) -> Any:
        """Return the decoded table at ``position``.

        Args:
            position: Offset of the table; validated here.
            name: Name of the table, a key of ``Format.tables``.

        Raises:
            FormatError: The table, or a target of its offsets, is malformed.
        """
        return self._makers[name](position)

    def objects(self, vector: int, name: str, field: str) -> list[Any]:
        """Return the decoded tables of a vector; an absent vector (0) is empty.

        Args:
            vector: Offset of the vector; validated here.
            name: Name of the tables' kind, a key of ``Format.tables``.
            field: Field name, for error messages.
        """
        make = self._makers[name]
        return [make(at) for at in self.tables.tables(vector, field)]

    def _new_maker(self, name: str) -> Callable[[int], Any]:
        reader, fields = self.tables, self._form.tables[name]
        kind: Any = self._form.classes[name]
        read = reader.table(name)
        if fields and fields[-1].kind == "union":
            return self._union_maker(name, kind)
        steps = [
            (at, step) for at, member in enumerate(fields) if (step := self._step(name, member))
        ]
        names = [field.name for field in fields]
        order = [names.index(member.name) for member in dataclasses.fields(kind)]
        build: Callable[..., Any] = kind
        if order != sorted(order):
            build = lambda *values: kind(*itemgetter(*order)(values))  # noqa: E731

        if not steps:
            return lambda position: build(*read(position))
        # Tables of scalars only are charged to the table that refers to them.
        cost = 48 + 8 * len(fields) + 80 * sum(field.kind in self._form.tables for field in fields)

        def make(position: int) -> Any:
            reader.budget -= cost
            if reader.budget < 0:
                reader.spend(0, name, position)
            values = read(position)
            if values.__class__ is tuple:  # of a table without offsets
                values = [*values]
            try:
                for at, step in steps:
                    values[at] = step(values[at])
            except MissingFieldError as error:
                raise (error if error.offset else self._error(name, position)) from None
            return build(*values)

        # Frozen objects are decoded once and shared.
        return cache(make) if kind.__dataclass_params__.frozen else make

    def _union_maker(self, name: str, kind: type) -> Callable[[int], Any]:
        """Return the decoder of a table that consists of one union."""
        read, members = self.tables.table(name), self._form.unions[self._form.tables[name][-1].of]

        def new(number: int) -> Callable[[int], Any] | None:
            return self._makers[members[number]] if 0 < number < len(members) else None

        makers = _Lazy(new)

        def make(position: int) -> Any:
            number, member = read(position)
            make_member = makers[number]
            if make_member is None or not member:
                raise self._error(name, position)
            return kind(make_member(member))

        return make

    def _step(self, name: str, field: Field) -> _Step | None:
        """Return the function that converts a field to an attribute, None for the identity."""
        where = f"{name}.{field.name}"
        if field.of:
            members: _Lazy[int, Any] = _Lazy(lambda _: _absent(where))
            members.update(self._form.members(field.of))
            return members.__getitem__
        if not field.is_offset:
            return None
        read = self._reader_of(where, field)
        if field.is_required and (field.kind == "str" or field.item in SCALAR_CODES):
            return read
        is_required = field.is_required
        may_miss = self._form.may_miss(name, field)
        absent: Callable[[], Any] = {"str": str, "bytes": bytes}.get(field.kind, list)

        def step(at: int) -> Any:
            if at:
                return read(at)
            if is_required:
                _absent(where)
            return None if may_miss else absent()

        return step

    def _reader_of(self, where: str, field: Field) -> Callable[[int], Any]:
        """Return the decoder of an offset's target."""
        reader, item = self.tables, field.item
        if field.kind == "str":
            return lambda at: reader.string(at, where)
        if field.kind == "bytes":
            return lambda at: reader.bytes_at(at, where)
        if item in SCALAR_CODES:
            return reader.vector(item, where, field.most)
        if item:
            return lambda at: self.objects(at, item, where)
        return self._makers[field.kind]

    def _error(self, name: str, position: int) -> FormatError:
        """Return the error for the first invalid field of a table."""
        values = self.tables.fields(name, position)
        for at, field in enumerate(self._form.tables[name]):
            where = f"{name}.{field.name}"
            if field.of and not field.is_offset:
                union = self._form.unions.get(field.of)
                members: Collection[object] = range(1, len(union or ()))
                if union is None:
                    members = list(self._form.members(field.of).values())
                if values[at] not in members:
                    expected = ", ".join(map(repr, members))
                    reason = f"found {values[at]}, expected one of {expected}"
                    return ContentError(reason, field=where, offset=position)
            if field.is_required and not values[at]:
                return MissingFieldError("found none, expected one", field=where, offset=position)
        raise AssertionError("a table without an invalid field")


def _absent(where: str) -> NoReturn:
    """Raise for an absent field or union member; the table's decoder adds the offset."""
    raise MissingFieldError("found none, expected one", field=where)


class _Lazy(dict[_K, _V]):
    """Dictionary that creates each value on first lookup."""

    def __init__(self, make: Callable[[_K], _V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _K) -> _V:
        value = self[key] = self._make(key)
        return value
