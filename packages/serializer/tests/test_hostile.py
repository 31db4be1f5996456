"""No file makes the reader do anything but read it, or refuse it with its one error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serializer_hostile import bad_contents, damaged  # type: ignore[import-not-found]
from serializer_programs import add_program  # type: ignore[import-not-found]

from lowerdeck.serializer import FormatError, deserialize_pte, serialize_pte, verify_pte

_DATA = Path(__file__).parent / "data"
_FILES = sorted(path.name for path in _DATA.glob("*.pte"))


def _refused(data: bytes) -> bool:
    """Return whether a file was refused; any other error than the one allowed fails the test."""
    try:
        deserialize_pte(data)
        verify_pte(data)
    except FormatError as error:
        told = error.offset is None or 0 <= error.offset <= max(len(data), 40)
        return _check(bool(error.field and error.reason and told))
    return False


def _check(told: bool) -> bool:
    assert told, "an error names a field, a reason, and an offset inside the file"
    return told


@pytest.mark.parametrize("name", _FILES)
def test_damaged_files_are_verified_or_refused(name: str) -> None:
    data = (_DATA / name).read_bytes()
    refused = sum(_refused(damage) for _, damage in damaged(data, 7, 240))
    # Much damage hits bytes that matter to nobody, but by far not all of it.
    assert refused > 60


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", _FILES)
def test_many_damaged_files_are_verified_or_refused(name: str, seed: int) -> None:
    data = (_DATA / name).read_bytes()
    assert sum(_refused(damage) for _, damage in damaged(data, seed, 2000)) > 400


@pytest.mark.parametrize("name", _FILES)
def test_bad_content_is_refused(name: str) -> None:
    data = (_DATA / name).read_bytes()
    accepted = [what for what, file in bad_contents(data) if not _refused(file)]
    assert accepted == []


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert _refused(data)


@settings(deadline=None)
@given(st.data())
def test_any_edit_of_a_program_is_verified_or_refused(data: st.DataObject) -> None:
    file = bytearray(serialize_pte(add_program()))
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(file) - 4))
        file[position : position + 4] = data.draw(st.binary(min_size=4, max_size=4))
    _refused(bytes(file))


def test_memory_is_bounded_by_the_size_of_a_file_that_shares_everything() -> None:
    # Every method is one and the same table, so that a few kilobytes unfold to many megabytes.
    file = _shared_methods(400, 400)
    tracemalloc.start()
    with pytest.raises(FormatError, match="times its"):
        deserialize_pte(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 * len(file) + (4 << 20)


def _shared_methods(methods: int, values: int) -> bytes:
    """Return a file whose methods are all one table, by pointing their offsets at it."""
    program = add_program()
    plan = program.execution_plan[0]
    plan.values = [plan.values[0]] * values
    program.execution_plan = [plan] + [type(plan)(f"m{i}") for i in range(methods - 1)]
    data = bytearray(serialize_pte(program))
    root = int.from_bytes(data[:4], "little")
    vtable = root - int.from_bytes(data[root : root + 4], "little", signed=True)
    field = root + int.from_bytes(data[vtable + 6 : vtable + 8], "little")
    vector = field + int.from_bytes(data[field : field + 4], "little")
    count = int.from_bytes(data[vector : vector + 4], "little")
    assert count == methods
    first = vector + 4 + int.from_bytes(data[vector + 4 : vector + 8], "little")
    for index in range(methods):
        position = vector + 4 + 4 * index
        data[position : position + 4] = (first - position).to_bytes(4, "little")
    return bytes(data)
