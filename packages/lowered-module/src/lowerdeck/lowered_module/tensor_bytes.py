"""The elements of a tensor as bytes, without numpy and without a copy."""

from __future__ import annotations

import ctypes

import torch

from lowerdeck.lowered_module._torch_private import data_address


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor in row-major order.

    Args:
        tensor: A dense tensor; one that is not contiguous, or not on the CPU, is copied first.

    Returns:
        A view that keeps the memory behind it alive.
    """
    dense = tensor.detach().cpu().contiguous()
    count = dense.numel() * dense.element_size()
    if count == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * count).from_address(data_address(dense))
    array.owner = dense  # type: ignore[attr-defined]  # the view holds the array, the array this
    return memoryview(array).cast("B")
