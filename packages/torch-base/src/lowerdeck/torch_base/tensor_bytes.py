"""A tensor as its bytes, and bytes as a tensor: without numpy and without a copy."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from lowerdeck.torch_base._torch_private import data_address


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in row-major order, to be read only.

    Args:
        tensor: A dense tensor; one that is not contiguous, or not on the CPU, is copied first.

    Returns:
        A view that keeps its memory alive.
    """
    dense = tensor.detach().cpu().contiguous()
    count = dense.numel() * dense.element_size()
    if count == 0:
        return memoryview(b"")
    array = _memory_type(count).from_address(data_address(dense))
    array.owner = dense  # the view holds the array, the array this
    # Read-only views can be hashed, which ExecuTorch does with weights.
    return memoryview(array).cast("B").toreadonly()


def view_tensor(
    data: memoryview | bytes, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor whose memory is ``data``.

    Args:
        data: Exactly the bytes of the tensor, in row-major order. They may be read-only, as a
            mapped file is: then the tensor must not be written to.
        dtype: Type of an element.
        shape: Sizes of the dimensions.

    Returns:
        The tensor; it keeps ``data`` alive.

    Raises:
        ValueError: ``data`` has more or fewer bytes than the shape and the dtype need.
    """
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise ValueError(
            f"a {dtype} tensor of shape {list(shape)} has {needed} bytes, found {len(data)}"
        )
    if needed == 0:
        return torch.empty(*shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns of read-only memory, once; a map of a file is read-only on purpose.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape))


@lru_cache(maxsize=1024)
def _memory_type(count: int) -> Any:
    # Kept by size: making a type takes 15 us, as long as hashing 30 kB.
    # A view can be hashed, as bytes can, only if what it is a view of can be; arrays cannot.
    return type("Memory", (ctypes.c_ubyte * count,), {"__hash__": object.__hash__})
