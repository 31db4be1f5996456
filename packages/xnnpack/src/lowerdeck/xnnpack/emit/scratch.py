"""Temporary storage for constants converted during compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lowerdeck.torch_base import storage_identity, tensor_in_file

IN_MEMORY = 8 << 20
"""Bytes of results kept in memory per partition; further ones go to files."""
_PIECE = 1 << 20
"""Elements converted at once; even, because one byte may store two."""
_LARGEST_HALF = torch.finfo(torch.float16).max
Change = Callable[[torch.Tensor], torch.Tensor]


class Scratch:
    """Converts constants chunk by chunk.

    Results stay in memory up to ``IN_MEMORY`` bytes. Others are stored in unnamed temporary files,
    or in memory if that fails.
    """

    def __init__(self) -> None:
        self._left = IN_MEMORY
        self._existing: set[int | None] = set()

    def add_existing(self, tensor: torch.Tensor) -> None:
        """Exempt the memory of a plain tensor from the limit."""
        if type(tensor) is torch.Tensor:
            # Not keyed by address: reading it would materialise a lazy copy of the weights.
            self._existing.add(storage_identity(tensor))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor contiguous: unchanged, or copied to memory or a file."""
        dense = tensor.is_contiguous()
        if dense and storage_identity(tensor) in self._existing:
            return tensor
        if dense and self._reserve(tensor.numel() * tensor.element_size()):
            self.add_existing(tensor)
            return tensor
        return self.create(tensor, tensor.dtype).reshape(tensor.shape)

    def convert(
        self, tensor: torch.Tensor, dtype: torch.dtype, change: Change | None = None
    ) -> torch.Tensor:
        """Return a converted tensor; the tensor itself if no conversion is needed.

        Args:
            change: Conversion other than a cast.
        """
        if tensor.dtype == dtype and change is None:
            return tensor
        return self.create(tensor, dtype, change).reshape(tensor.shape)

    def create(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        change: Change | None = None,
        *,
        width: int = 1,
    ) -> torch.Tensor:
        """Return the converted elements of a tensor, as one row.

        Args:
            source: Read in row-major order.
            change: Converts a chunk of ``source``, a 1-D tensor; None casts.
            width: Number of elements of ``source`` per result element.
        """
        count = source.numel() // width

        def pieces() -> Iterator[torch.Tensor]:
            for piece in pieces_of(source):
                yield (piece if change is None else change(piece)).to(dtype)

        storage = None
        if not self._reserve(count * dtype.itemsize):
            storage = tensor_in_file(pieces(), count, dtype)
        if storage is None:
            storage = torch.empty(count, dtype=dtype)
            start = 0
            for piece in pieces():
                storage[start : start + piece.numel()] = piece
                start += piece.numel()
        self.add_existing(storage)
        return storage

    def _reserve(self, size: int) -> bool:
        fits = size <= self._left
        self._left -= size if fits else 0
        return fits


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order, in pieces to convert."""
    tensor = tensor.detach()
    if tensor.numel() <= _PIECE or tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1), _PIECE)
        return
    rows = _PIECE // tensor[0].numel()
    for part in torch.split(tensor, rows) if rows else tensor:
        yield from pieces_of(part)


def fits_half(tensor: torch.Tensor) -> bool:
    """Return whether all elements fit into float16 and none is NaN, without a copy.

    Args:
        tensor: A tensor that is not empty.
    """
    low, high = map(float, tensor.aminmax())
    return low >= -_LARGEST_HALF and high <= _LARGEST_HALF
