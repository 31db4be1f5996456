"""Deduplicated bytes of constants, as views of the tensors' memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from lowerdeck.serializer import Buffer
from lowerdeck.torch_base import data_address

# Constants of at most this many bytes are compared by content, larger ones only by memory.
_COMPARED_UP_TO = 4096


class ConstantPool:
    """Pool of the constants of all methods of a program.

    Small constants are deduplicated by content, large ones by address.

    Attributes:
        buffers: The buffers in order; entry 0 is reserved and empty.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = [Buffer(b"")]
        # By content, or by address and length of memory that ``buffers`` keeps alive.
        self._indices: dict[bytes | tuple[int, int], int] = {}
        # Each entry keeps its source tensor alive, so that the address is not reused.
        self._laid_out: dict[Any, tuple[torch.Tensor, memoryview]] = {}

    def bytes_of(self, tensor: torch.Tensor, dim_order: tuple[int, ...]) -> memoryview:
        """Return the bytes of a tensor in the given layout, cached by tensor.

        The memory is not copied if the tensor already has that layout.

        Args:
            tensor: A dense tensor on any device.
            dim_order: Dimensions from the outermost in memory to the innermost.
        """
        if not tensor.numel():
            return memoryview(b"")
        if _has_layout(tensor, dim_order):
            return _view(tensor.detach().permute(dim_order))
        key = (_identity(tensor), dim_order)
        if key not in self._laid_out:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg()
            self._laid_out[key] = (tensor, _view(plain.permute(dim_order).contiguous()))
        return self._laid_out[key][1]

    def index_of(self, data: memoryview) -> int:
        """Return the index of the buffer with these bytes, added if it is new.

        Args:
            data: A slice of the result of :meth:`bytes_of`.
        """
        small = len(data) <= _COMPARED_UP_TO
        key = bytes(data) if small else (_address(data), len(data))
        if key not in self._indices:
            self._indices[key] = len(self.buffers)
            self.buffers.append(Buffer(data))
        return self._indices[key]


def _has_layout(tensor: torch.Tensor, dim_order: tuple[int, ...]) -> bool:
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.permute(dim_order).is_contiguous()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two live tensors share only if they alias with equal metadata."""
    return (
        data_address(tensor),
        str(tensor.device),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor as a view that keeps its memory alive."""
    size = tensor.numel() * tensor.element_size()
    array = (ctypes.c_ubyte * size).from_address(data_address(tensor))
    # The view does not own the memory: keep the tensor alive as long as the view.
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
