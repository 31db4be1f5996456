"""Planned memory: a zeroed block for each memory id of a method."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from lowerdeck.runner.errors import ProgramError

MAX_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Limit of one arena or tensor: the machine's memory."""

POISON = 0xFF  # NaN in float types, -1 in signed integers


def require_memory(size: int, purpose: str) -> None:
    """Check a size before it is allocated.

    Args:
        purpose: Use of the memory, for the message.

    Raises:
        ProgramError: The size is negative or exceeds the machine's memory.
    """
    if size < 0:
        raise ProgramError(f"{purpose} has the size {size}")
    if size > MAX_BYTES:
        raise ProgramError(f"cannot allocate {purpose} of {size} bytes; the limit is {MAX_BYTES}")


class Arena:
    """Bytes of one memory id, with views on them.

    Args:
        shared: Whether several methods store state in it.

    Raises:
        ProgramError: The memory cannot be allocated.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        require_memory(size, "planned memory")
        try:
            self.bytes: torch.Tensor = torch.zeros(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise ProgramError(
                f"cannot allocate planned memory of {size} bytes: {error}"
            ) from error
        self.size = size
        self.shared = shared
        self.initialised: set[int] = set()
        """Offsets of tensors whose initial value has been written."""

    def view(
        self, dtype: torch.dtype, sizes: Sequence[int], dim_order: Sequence[int], offset: int
    ) -> Tensor:
        """Return a view at ``offset``.

        Args:
            dim_order: Dimensions from outermost to innermost in memory.

        Raises:
            ProgramError: The tensor is out of bounds, or its offset is not aligned for its dtype.
        """
        count = 1
        for size in sizes:
            count *= size
        end = offset + count * dtype.itemsize
        if not 0 <= offset <= end <= self.size:
            raise ProgramError(
                f"a tensor of shape {list(sizes)} at offset {offset} ends at byte {end} of a "
                f"planned memory of {self.size} bytes; the file's memory plan is broken"
            )
        if offset % dtype.itemsize:
            raise ProgramError(
                f"a {dtype} tensor starts at offset {offset}, which is not a multiple of its "
                f"{dtype.itemsize} bytes; plan memory with an alignment of 16"
            )
        return torch.empty(0, dtype=dtype).set_(
            self.bytes.untyped_storage(),
            offset // dtype.itemsize,
            tuple(sizes),
            strides_of(sizes, dim_order),
        )


def strides_of(sizes: Sequence[int], dim_order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor.

    Args:
        dim_order: Dimensions from outermost to innermost in memory.
    """
    strides = [1] * len(sizes)
    stride = 1
    for dim in reversed(dim_order):
        strides[dim] = stride
        stride *= max(sizes[dim], 1)
    return tuple(strides)
