"""The bytes of constants, held as views on the tensors' own memory and stored once each."""

from __future__ import annotations

import ctypes

import torch

from lowerdeck.serializer import Buffer

# Below this size equal bytes are found by comparing them; above it only the same memory is.
_COMPARED_UP_TO = 4096


class ConstantPool:
    """Collects the constants of all methods of a program.

    Attributes:
        buffers: The buffers in order; entry 0 is reserved and empty.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = [Buffer(b"")]
        self._by_memory: dict[tuple[int, int], int] = {}
        self._by_content: dict[bytes, int] = {}

    def index_of(self, data: memoryview, address: int) -> int:
        """Return the index of the buffer that holds ``data``, added when it is new.

        Args:
            data: The bytes.
            address: Where they lie in memory, which tells equal weights apart cheaply.
        """
        place = (address, len(data))
        if len(data) and place in self._by_memory:
            return self._by_memory[place]
        small = bytes(data) if len(data) <= _COMPARED_UP_TO else None
        index = self._by_content.get(small) if small is not None else None
        if index is None:
            index = len(self.buffers)
            self.buffers.append(Buffer(data))
            if small is not None:
                self._by_content[small] = index
        if len(data):
            self._by_memory[place] = index
        return index


def bytes_of(tensor: torch.Tensor, dim_order: tuple[int, ...]) -> tuple[memoryview, int]:
    """Return the bytes of a tensor in the given layout, and their address.

    The memory is not copied when the tensor lies in that layout already.

    Args:
        tensor: A tensor on any device.
        dim_order: Dimensions from the outermost in memory to the innermost.
    """
    laid_out = tensor.detach().cpu().resolve_conj().resolve_neg().permute(dim_order).contiguous()
    size = laid_out.numel() * laid_out.element_size()
    if size == 0:
        return memoryview(b""), 0
    address = laid_out.data_ptr()
    array = (ctypes.c_ubyte * size).from_address(address)
    # The view borrows the tensor's memory: keep the tensor as long as the view.
    array.owner = laid_out  # type: ignore[attr-defined]
    return memoryview(array).cast("B"), address
