"""The bytes of a tensor as a view, and a tensor as a view on bytes: weights are never copied."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Sequence

import torch

from lowerdeck.demo_backends._torch_private import data_address


def tensor_view(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements in row-major order as bytes.

    Args:
        tensor: Any dense CPU tensor; one that is not contiguous is copied first.

    Returns:
        A view on the tensor's own memory, which it keeps alive.
    """
    dense = tensor.detach().contiguous()
    count = dense.numel() * dense.element_size()
    if count == 0:
        return memoryview(b"")
    # Not through numpy, which torch does not need: a ctypes array is as good a buffer.
    array = (ctypes.c_ubyte * count).from_address(data_address(dense))
    array.owner = dense  # type: ignore[attr-defined]  # the view keeps the array, the array the tensor
    return memoryview(array).cast("B")


def view_tensor(
    data: memoryview | bytes, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor that lies on ``data``.

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
