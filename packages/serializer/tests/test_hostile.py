"""No file makes the reader do anything but read it, or refuse it with its one error."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from serializer_hostile import bad_contents, damaged  # type: ignore[import-not-found]

from lowerdeck import serializer as pte
from lowerdeck.serializer import FormatError, deserialize_pte, serialize_pte, verify_pte
from lowerdeck_files import DATA
from lowerdeck_files.payloads import convolution, linear, payload, relu
from lowerdeck_files.programs import add_program

_FILES = sorted(path.name for path in DATA.glob("*.pte"))


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


MANY = [pytest.param(seed, 2000, marks=pytest.mark.heavy) for seed in range(8)]


@pytest.mark.parametrize(("seed", "count"), [(7, 240), *MANY])
@pytest.mark.parametrize("name", _FILES)
def test_damaged_files_are_verified_or_refused(name: str, seed: int, count: int) -> None:
    data = (DATA / name).read_bytes()
    # Much damage hits bytes that matter to nobody, but by far not all of it.
    assert sum(_refused(damage) for _, damage in damaged(data, seed, count)) > count / 5


@pytest.mark.parametrize("name", _FILES)
def test_bad_content_is_refused(name: str) -> None:
    data = (DATA / name).read_bytes()
    accepted = [what for what, file in bad_contents(data) if not _refused(file)]
    assert accepted == []


FORMATS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "ptd": ((DATA / "external_ptd.ptd").read_bytes(), pte.deserialize_ptd),
    **{
        f"payload of {make.__name__}": (payload(make(), bytes(64)), pte.decode_payload)
        for make in (relu, convolution, linear)
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_of_other_formats_are_read_or_refused(name: str) -> None:
    data, read = FORMATS[name]
    refused = 0
    zeroed = [data[:at] + b"\0" + data[at + 1 :] for at in range(min(len(data), 2000))]
    for damage in (*zeroed, *(file for _, file in damaged(data, 3, 600))):
        try:
            read(damage)
        except pte.FormatError:
            refused += 1
    assert refused > 60


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
