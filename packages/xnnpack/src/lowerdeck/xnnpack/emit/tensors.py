"""Tensors of a partition: sizes, constant data, and payload values."""

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
        scales: One scale, one for each index of ``axis``, or one for each group along the last
            dimension of a matrix.
        zero_points: The integers that represent 0.0, one for each scale.
        axis: Dimension of per-channel scales; None for one scale or groups.
        group: Group size along the last dimension, 0 without groups.
        bits: 4 if the program declares a range of -8..7, else 8.
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
        """Return the dequantised values in float32."""
        moved = self.data.to(torch.int32) - self._spread(self.zero_points.to(torch.int32))
        return moved.float() * self._spread(self.scales.float())

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return per-scale numbers in a shape that broadcasts against the integers."""
        if self.group:
            return numbers.repeat_interleave(self.group, 1)
        if self.axis is None:
            # Keep a single number 0-dim.
            return numbers.reshape(())
        return numbers.reshape(
            [-1 if dimension == self.axis else 1 for dimension in range(self.data.dim())]
        )

    def permuted(self, order: Sequence[int]) -> Quantized | None:
        """Return the permuted constant, None if it has groups."""
        if self.group:
            return None
        axis = None if self.axis is None else list(order).index(self.axis)
        data = self.data.permute(*order)
        return Quantized(data, self.scales, self.zero_points, axis, 0, self.bits)

    def summands(self) -> list[Quantized]:
        """Return up to three matrices with zero points of 0 whose sum equals this one."""
        centred = self.centred()
        if centred is not None:
            return [centred]
        left, most = self._without_zero_points(), 2 ** (self.bits - 1) if self.group else 128
        terms: list[Quantized] = []
        while not terms or bool(left.any()):
            part = left.clamp(-most, most - 1)
            left = left - part
            terms.append(self._around_zero(part, self.bits if self.group else 8))
        return terms

    def _around_zero(self, data: torch.Tensor, bits: int) -> Quantized:
        empty = torch.zeros_like(self.zero_points)
        return Quantized(data.to(torch.int8), self.scales, empty, self.axis, self.group, bits)

    def _without_zero_points(self) -> torch.Tensor:
        """Return the integers with their zero points subtracted."""
        return self.data.to(torch.int16) - self._spread(self.zero_points.to(torch.int16))

    def centred(self) -> Quantized | None:
        """Return the constant with zero points of 0, or None if ``summands`` must split it."""
        if self.is_symmetric:
            return self
        if self.group:
            return None
        moved = self._without_zero_points()
        low, high = int(moved.min()), int(moved.max())
        if low < -128 or high > 127:
            return None
        return self._around_zero(moved, 4 if low >= -8 and high <= 7 else 8)


@dataclass(slots=True)
class Tracked:
    """A tensor of the partition, with its constant data and its payload values.

    Attributes:
        shape: Sizes in torch's order of dimensions.
        data: The data of a constant, else None.
        preferred: The layout in which the tensor is produced.
        ids: Ids of its payload values in ``encoding``, by layout.
        encoding: Dtype, with scales and zero points if quantised.
        conversions: The same tensor in other encodings, created at first use.
        derived: Results computed from it that several users share, by key.
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
        """Return a tensor with constant data."""
        return cls(tuple(data.shape), data, encoding=encoding)

    @property
    def is_constant(self) -> bool:
        """Whether the data are known ahead of time."""
        return self.data is not None

    @property
    def tensor(self) -> torch.Tensor | None:
        """The data of a constant, quantised and half-precision ones in float32; else None."""
        if isinstance(self.data, Quantized):
            return self.data.dequantized()
        if self.data is not None and self.data.dtype in (torch.float16, torch.bfloat16):
            return self.data.float()
        return self.data
