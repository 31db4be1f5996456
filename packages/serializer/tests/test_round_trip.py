"""Programs that are written are read back, and then written to the same bytes."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowerdeck.serializer import (
    BackendDelegateInlineData,
    Buffer,
    DataLocation,
    Program,
    Tensor,
    deserialize_pte,
    serialize_pte,
)
from lowerdeck_files.programs import add_program, programs

_SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))

_layouts = st.fixed_dictionaries(
    {},
    optional={
        "segment_alignment": st.sampled_from([1, 3, 16, 100, 128, 256, 4096, 8192]),
        "constant_tensor_alignment": st.sampled_from([1, 4, 16, 32, 64, 128, 512]),
        "delegate_alignment": st.sampled_from([1, 8, 16, 64, 128]),
        "extract_delegate_segments": st.booleans(),
    },
)

_INSIDE = {"constant_tensor_alignment", "delegate_alignment"}


@_SETTINGS
@given(programs(partial=False), _layouts)
def test_reading_and_writing_again_gives_the_same_bytes(
    program: Program, layout: dict[str, int]
) -> None:
    data = serialize_pte(program, **layout)  # type: ignore[arg-type]
    assert serialize_pte(program, **layout) == data  # type: ignore[arg-type]
    # Files store neither alignments nor the lengths of unused constants.
    plain = layout.get("segment_alignment", 128) in (1, 16, 128, 256, 4096)
    plain = plain and not program.named_data and not layout.keys() & _INSIDE
    if plain and _unused(program) == 0:
        assert serialize_pte(deserialize_pte(data)) == data


@_SETTINGS
@given(programs(partial=False), _layouts)
def test_everything_but_padding_comes_back(program: Program, layout: dict[str, int]) -> None:
    found = deserialize_pte(serialize_pte(program, **layout))  # type: ignore[arg-type]
    _compare_methods(program, found)
    assert found.version == program.version
    _compare_buffers(program.constant_buffer, found.constant_buffer)
    _compare_buffers(program.mutable_data, found.mutable_data)
    assert [(entry.key, bytes(entry.data)) for entry in found.named_data] == [  # type: ignore[arg-type]
        (entry.key, entry.data) for entry in program.named_data
    ]


def _unused(program: Program) -> int:
    values = [value.val for plan in program.execution_plan for value in plan.values]
    used = {
        (value.allocation_info is None, value.data_buffer_idx)
        for value in values
        if isinstance(value, Tensor) and value.data_buffer_idx
    }
    return len(program.constant_buffer) + len(program.mutable_data) - 2 - len(used)


def _compare_methods(program: Program, found: Program) -> None:
    """Compare the methods, delegates by their bytes, for their order is the writer's."""
    for given_plan, plan in zip(program.execution_plan, found.execution_plan, strict=True):
        for ours, theirs in zip(given_plan.delegates, plan.delegates, strict=True):
            assert theirs.processed.location is DataLocation.INLINE
            assert _data(program, ours.processed.index) == _data(found, theirs.processed.index)
        expected, actual = copy.copy(given_plan), copy.copy(plan)
        for delegates in (expected, actual):
            delegates.delegates = [copy.copy(delegate) for delegate in delegates.delegates]
            for delegate in delegates.delegates:
                delegate.processed = given_plan.delegates[0].processed
        assert actual == expected


def _data(program: Program, index: int) -> bytes:
    entry: BackendDelegateInlineData = program.backend_delegate_data[index]
    return bytes(entry.data)  # type: ignore[arg-type]


def _compare_buffers(expected: list[Buffer], found: list[Buffer]) -> None:
    """Compare contents; a file stores no lengths: tensors or the next entry tell them."""
    assert len(found) == len(expected)
    for ours, theirs in zip(expected, found, strict=True):
        stored, source = bytes(theirs.storage), bytes(ours.storage)  # type: ignore[arg-type]
        assert stored.startswith(source) or source.startswith(stored)


@pytest.mark.parametrize("size", [0, 1, 16, 17])
def test_length_of_a_used_constant_is_exact(size: int) -> None:
    program = add_program()
    program.constant_buffer.append(Buffer(b"x" * size))
    found = deserialize_pte(serialize_pte(program))
    assert found.execution_plan == program.execution_plan
    assert bytes(found.constant_buffer[1].storage) == bytes(range(24))  # type: ignore[arg-type]
