"""The numbers of torch's memory formats, and when a tensor in a program is in one of them."""

from __future__ import annotations

from types import MappingProxyType

import torch

MEMORY_FORMATS = MappingProxyType(
    {
        0: torch.contiguous_format,
        1: torch.preserve_format,
        2: torch.channels_last,
        3: torch.channels_last_3d,
    }
)
"""The memory format of each number (``c10::MemoryFormat``) that programs keep as arguments."""

_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}


def lies_channels_last(tensor: torch.Tensor) -> bool:
    """Tell whether a program holds a tensor with its channels last: only where nothing else fits.

    A tensor of one channel, or one pixel, lies both ways. Whoever compiles a part of a program and
    whoever writes the rest must call it the same, and plain is what more kernels take.

    Args:
        tensor: A tensor, or what stands for it in a graph.
    """
    wanted = _BY_RANK.get(tensor.dim())
    if wanted is None or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=wanted)
