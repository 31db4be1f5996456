"""Tensors of a partition: sizes, constant data, and the values that hold them.

Constant integers keep their scales: they are weights that the program dequantises before use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnEncoding
from lowerdeck.xnnpack.payload import FLOAT, Layout


@dataclass(frozen=True, slots=True)
class Quantized:
    """A constant tensor stored as integers.

    Attributes:
        data: The integers, always as int8.
        scales: Distance of neighbouring integers: one number, one for each index of ``axis``, or
            one for each group along the last dimension of a matrix.
        zero_points: The integers that represent 0.0, one for each scale.
        axis: The dimension with a scale for each index; None if there is one scale, or groups.
        group: Number of neighbours along the last dimension that share a scale, 0 without groups.
        bits: 4 if the program declares all integers to be in -8..7, else 8.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor
    axis: int | None = None
    group: int = 0
    bits: int = 8

    @property
    def is_symmetric(self) -> bool:
        """Whether all zero points are 0."""
        return not bool(self.zero_points.any())

    def dequantized(self) -> torch.Tensor:
        """Return the real numbers, in float32."""
        moved = self.data.to(torch.int32) - self._spread(self.zero_points.to(torch.int32))
        return moved.float() * self._spread(self.scales.float())

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return one number for each scale, in sizes that broadcast against the integers."""
        if self.group:
            return numbers.repeat_interleave(self.group, 1)
        if self.axis is None:
            # A single number has no dimensions, and must not get one.
            return numbers.reshape(())
        return numbers.reshape(
            [-1 if dimension == self.axis else 1 for dimension in range(self.data.dim())]
        )

    def permuted(self, order: Sequence[int]) -> Quantized | None:
        """Return it with its dimensions in another order, None if groups forbid that."""
        if self.group:
            return None
        axis = None if self.axis is None else list(order).index(self.axis)
        data = self.data.permute(*order)
        return Quantized(data, self.scales, self.zero_points, axis, 0, self.bits)

    def summands(self) -> list[Quantized]:
        """Return matrices with zero points of 0 whose sum it is: itself, or up to three."""
        centred = self.centred()
        if centred is not None:
            return [centred]
        left, most = self._moved(), 2 ** (self.bits - 1) if self.group else 128
        terms: list[Quantized] = []
        while not terms or bool(left.any()):
            part = left.clamp(-most, most - 1)
            left = left - part
            terms.append(self._around_zero(part, self.bits if self.group else 8))
        return terms

    def _around_zero(self, data: torch.Tensor, bits: int) -> Quantized:
        empty = torch.zeros_like(self.zero_points)
        return Quantized(data.to(torch.int8), self.scales, empty, self.axis, self.group, bits)

    def _moved(self) -> torch.Tensor:
        """Return the integers minus their zero points."""
        return self.data.to(torch.int16) - self._spread(self.zero_points.to(torch.int16))

    def centred(self) -> Quantized | None:
        """Return it with zero points of 0, None if that takes more than 8 bits, or with groups."""
        if self.is_symmetric:
            return self
        if self.group:
            return None
        moved = self._moved()
        low, high = int(moved.min()), int(moved.max())
        if low < -128 or high > 127:
            return None
        return self._around_zero(moved, 4 if low >= -8 and high <= 7 else 8)


@dataclass(slots=True)
class Tracked:
    """One tensor of the partition, with its constant data and its values in the payload.

    Attributes:
        shape: Sizes in torch's order of dimensions.
        data: The data of a constant, else None.
        preferred: The layout in which the tensor is produced.
        ids: Its values in the payload, encoded as ``encoding``, by layout.
        encoding: Dtype, with scales and zero points if quantised.
        conversions: The same tensor in other encodings, created at first use.
        derived: Results computed from it that several readers share, by key.
    """

    shape: tuple[Dim, ...]
    data: torch.Tensor | Quantized | None = None
    preferred: Layout = Layout.PLAIN
    ids: dict[Layout, int] = field(default_factory=dict)
    encoding: XnnEncoding = FLOAT
    conversions: dict[XnnEncoding, Tracked] = field(default_factory=dict)
    derived: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: torch.Tensor, encoding: XnnEncoding = FLOAT) -> Tracked:
        """Return a constant."""
        return cls(tuple(data.shape), data, encoding=encoding)

    @property
    def is_constant(self) -> bool:
        """Whether the data are known ahead of time."""
        return self.data is not None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The data of a constant as real numbers, else None."""
        if isinstance(self.data, Quantized):
            return self.data.dequantized()
        if self.data is not None and self.data.dtype in (torch.float16, torch.bfloat16):
            return self.data.float()
        return self.data
