"""The elements of a tensor as bytes, without numpy and without a copy."""

from __future__ import annotations

import ctypes
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
    # Whoever is handed weights may hash them (ExecuTorch does), and none may change them.
    return memoryview(array).cast("B").toreadonly()


def _memory_type(count: int) -> Any:
    # A view can be hashed, as bytes can, only if what it is a view of can be; arrays cannot.
    return type("Memory", (ctypes.c_ubyte * count,), {"__hash__": object.__hash__})
