"""A tensor as a view on bytes: weights are never copied."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch


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
