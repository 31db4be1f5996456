"""Planned memory: one zeroed block of bytes for each memory id of a method."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.values.layout import strides_of

MAX_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The most memory that one arena or tensor may ask for: what the machine has."""

POISON = 0xFF  # every float type reads it as NaN, every signed integer as -1


def require_memory(size: int, what: str) -> None:
    """Check the size of a memory before it is allocated.

    Args:
        what: Purpose of the memory, for the message.

    Raises:
        ProgramError: The size is negative, or more than the machine has.
    """
    if size < 0:
        raise ProgramError(f"{what} has the size {size}")
    if size > MAX_BYTES:
        raise ProgramError(f"{what} of {size} bytes cannot be had; the machine has {MAX_BYTES}")


class Arena:
    """The bytes of one memory id, and the tensors allocated in them.

    Args:
        shared: Whether several methods keep their state in it.

    Attributes:
        bytes: The bytes, zeroed at first.

    Raises:
        ProgramError: The memory cannot be allocated.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        require_memory(size, "planned memory")
        try:
            self.bytes: torch.Tensor = torch.zeros(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise ProgramError(f"planned memory of {size} bytes cannot be had: {error}") from error
        self.size = size
        self.shared = shared
        self.initialised: set[int] = set()
        """Offsets of the mutable tensors whose initial value has been written."""

    def view(
        self, dtype: torch.dtype, sizes: Sequence[int], dim_order: Sequence[int], offset: int
    ) -> Tensor:
        """Return a tensor on the bytes from ``offset`` on.

        Args:
            dim_order: Dimensions from the outermost in memory to the innermost.

        Raises:
            ProgramError: The tensor does not fit, or its offset is not aligned for its dtype.
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
