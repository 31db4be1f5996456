"""Temporary storage for constants converted during compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lowerdeck.torch_base import storage_identity, tensor_in_file

IN_MEMORY = 8 << 20
"""Bytes that one partition may hold in memory, and there may be hundreds; others lie in files."""
_PIECE = 1 << 20
"""Elements that are converted at once; an even number, as two may go into one byte."""
_LARGEST_HALF = torch.finfo(torch.float16).max
Change = Callable[[torch.Tensor], torch.Tensor]


class Scratch:
    """Makes constants piece by piece, and takes little memory for all of them together.

    The first few stay in memory. The others lie in files without a name; where such a file cannot
    be written, memory is taken.
    """

    def __init__(self) -> None:
        self._left = IN_MEMORY
        self._known: set[int | None] = set()

    def know(self, tensor: torch.Tensor) -> None:
        """Note that a tensor lies in memory that is there anyway.

        Args:
            tensor: A constant of the program; a subclass is looked into later, part by part.
        """
        if type(tensor) is torch.Tensor:
            # Not by its address: asking for that would make a lazy copy of weights a true one.
            self._known.add(storage_identity(tensor))

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor whose elements lie in order, in memory that is there anyway or is left.

        Args:
            tensor: What is to be kept.
        """
        dense = tensor.is_contiguous()
        if dense and storage_identity(tensor) in self._known:
            return tensor
        if dense and self._takes(tensor.numel() * tensor.element_size()):
            self.know(tensor)
            return tensor
        return self.made(tensor, tensor.dtype).reshape(tensor.shape)

    def converted(
        self, tensor: torch.Tensor, dtype: torch.dtype, change: Change | None = None
    ) -> torch.Tensor:
        """Return a tensor with other elements, itself if it has that dtype and no change is given.

        Args:
            tensor: What is to be converted.
            dtype: What its elements become.
            change: How, where that is more than a cast.
        """
        if tensor.dtype == dtype and change is None:
            return tensor
        return self.made(tensor, dtype, change).reshape(tensor.shape)

    def made(
        self,
        source: torch.Tensor,
        dtype: torch.dtype,
        change: Change | None = None,
        *,
        width: int = 1,
    ) -> torch.Tensor:
        """Return elements that are made of others, in a row.

        Args:
            source: What they are made of, in row-major order.
            change: Makes some of them of a piece of ``source``, a row; None casts.
            width: How many elements of ``source`` make one.
        """
        count = source.numel() // width

        def pieces() -> Iterator[torch.Tensor]:
            for piece in pieces_of(source):
                yield (piece if change is None else change(piece)).to(dtype)

        made = None
        if not self._takes(count * dtype.itemsize):
            made = tensor_in_file(pieces(), count, dtype)
        if made is None:
            made = torch.empty(count, dtype=dtype)
            start = 0
            for piece in pieces():
                made[start : start + piece.numel()] = piece
                start += piece.numel()
        self.know(made)
        return made

    def _takes(self, size: int) -> bool:
        fits = size <= self._left
        self._left -= size if fits else 0
        return fits


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order, so many at once as are converted at once.

    Args:
        tensor: Any tensor; whole rows stay together where its elements do not lie in order.
    """
    tensor = tensor.detach()
    if tensor.numel() <= _PIECE or tensor.is_contiguous():
        yield from torch.split(tensor.reshape(-1), _PIECE)
        return
    rows = _PIECE // tensor[0].numel()
    for part in torch.split(tensor, rows) if rows else tensor:
        yield from pieces_of(part)


def fits_half(tensor: torch.Tensor) -> bool:
    """Return whether no number of a tensor is beyond float16, or NaN; makes no copy of it.

    Args:
        tensor: A tensor that is not empty.
    """
    low, high = map(float, tensor.aminmax())
    return low >= -_LARGEST_HALF and high <= _LARGEST_HALF
