"""Where tensors lie, and which overlap."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck.torch_base import Extent, MemoryMap


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return MemoryMap([Extent.of(one)]).find(Extent.of(other)) is not None


def test_parts_of_one_storage_overlap_only_where_they_do() -> None:
    whole = torch.zeros(8)
    assert overlap(whole[:5], whole[4:])
    assert not overlap(whole[:4], whole[4:])
    assert overlap(whole, whole.view(2, 4)[1])
    assert not overlap(whole, torch.zeros(8))
    assert not overlap(whole[:0], whole)


def test_two_storages_on_one_lent_memory_overlap() -> None:
    lent = bytearray(64)
    low = torch.frombuffer(lent, dtype=torch.float32, count=8)
    high = torch.frombuffer(lent, dtype=torch.float32, offset=16, count=8)
    assert overlap(low, high)


def test_tensors_without_an_address_are_told_apart_by_their_storage() -> None:
    whole = torch.zeros(8, device="meta")
    assert overlap(whole, whole[4:])
    assert not overlap(whole[:4], whole[4:])
    assert not overlap(whole, torch.zeros(8, device="meta"))
    sparse = torch.eye(2).to_sparse()
    assert overlap(sparse, sparse)
    assert not overlap(sparse, torch.eye(2).to_sparse())


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)), max_size=12))
def test_joined_extents_are_those_of_a_union(ranges: list[tuple[int, int]]) -> None:
    extents = [Extent("x", start, start + size) for start, size in ranges]
    memory = MemoryMap(extents)
    covered = {byte for one in extents for byte in range(one.start, one.end)}
    for extent in [*extents, *(Extent("x", byte, byte + 1) for byte in range(50))]:
        found = memory.find(extent)
        touched = covered.intersection(range(extent.start, extent.end))
        assert (found is not None) == bool(touched)
        if found is not None and extent in extents:
            assert found.start <= extent.start
            assert extent.end <= found.end
    assert memory.find(Extent("y", 0, 50)) is None
