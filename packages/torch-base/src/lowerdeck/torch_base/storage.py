"""Extents of tensors in memory, and their overlaps.

Storage ids are not enough: one storage may contain all weights of a file, and two storages may
have the same memory (``torch.from_numpy``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch

from lowerdeck.torch_base._torch_private import data_address, storage_identity


class Extent(NamedTuple):
    """Byte range from the first to the last element of a tensor.

    Valid while the tensor is alive.

    Attributes:
        space: Address space of ``start``: a device, or a storage without address.
        end: Exclusive; equal to ``start`` for empty tensors.
    """

    space: object
    start: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        """Return the extent of ``tensor``.

        Args:
            tensor: Any tensor; tensors without storage (sparse) overlap none.
        """
        storage = storage_identity(tensor)
        if storage is None:
            return cls(("object", id(tensor)), 0, 1)
        if tensor.is_contiguous():
            size = int(tensor.nbytes)
        else:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)
            size = reach * tensor.element_size()
        address = data_address(tensor)
        if address:
            return cls(tensor.device, address, address + size)
        first = int(tensor.storage_offset()) * tensor.element_size()
        return cls(("storage", storage), first, first + size)


class MemoryMap:
    """Interval map that merges overlapping extents."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        by_space: dict[object, list[tuple[int, int]]] = {}
        for extent in extents:
            by_space.setdefault(extent.space, []).append((extent.start, extent.end))
        self._joined: dict[object, list[tuple[int, int]]] = {}
        for space, ranges in by_space.items():
            joined: list[tuple[int, int]] = []
            for start, end in sorted(ranges):
                if joined and start < joined[-1][1]:
                    joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
                elif end > start:
                    joined.append((start, end))
            self._joined[space] = joined

    def __bool__(self) -> bool:
        """Return whether there is any non-empty extent."""
        return any(self._joined.values())

    def find(self, extent: Extent) -> Extent | None:
        """Return a merged extent that ``extent`` overlaps, or None."""
        joined = self._joined.get(extent.space, [])
        # Only the last range that starts before the end can overlap.
        index = bisect_right(joined, (extent.end - 1, 1 << 62)) - 1
        if index < 0 or joined[index][1] <= extent.start or extent.start == extent.end:
            return None
        return Extent(extent.space, *joined[index])
