"""Zero-copy conversion between tensors and bytes, without numpy."""

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
    """Return the bytes of a tensor in row-major order, read-only.

    Args:
        tensor: A dense tensor; copied if not contiguous or not on the CPU.

    Returns:
        A view that keeps the memory alive.
    """
    dense = tensor.detach().cpu().contiguous()
    count = dense.numel() * dense.element_size()
    if count == 0:
        return memoryview(b"")
    array = _memory_type(count).from_address(data_address(dense))
    array.owner = dense  # the view references the array, the array this
    # ExecuTorch hashes weights; only read-only views are hashable.
    return memoryview(array).cast("B").toreadonly()


def view_tensor(
    data: memoryview | bytes, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor on the memory of ``data``.

    Args:
        data: Exactly the tensor's bytes, in row-major order. If read-only, as in a mapped file,
            the tensor must not be written.

    Returns:
        The tensor, which keeps ``data`` alive.

    Raises:
        ValueError: The size of ``data`` does not match the shape and dtype.
    """
    needed = math.prod(shape) * dtype.itemsize
    if len(data) != needed:
        raise ValueError(
            f"a {dtype} tensor of shape {list(shape)} has {needed} bytes, found {len(data)}"
        )
    if needed == 0:
        return torch.empty(*shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns of read-only memory, which is intended here.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=dtype).reshape(tuple(shape))


@lru_cache(maxsize=1024)
def _memory_type(count: int) -> Any:
    # Cached by size: creating a type takes 15 us. Views are hashable only if their base is, which
    # ctypes arrays are not.
    return type("Memory", (ctypes.c_ubyte * count,), {"__hash__": object.__hash__})
