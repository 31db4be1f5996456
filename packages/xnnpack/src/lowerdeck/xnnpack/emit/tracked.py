"""A tensor of a partition: its sizes, its data if it is constant, and the values that hold it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.types import IntLikeType as Dim

from lowerdeck.serializer import XnnEncoding
from lowerdeck.xnnpack.emit.quantized import Quantized
from lowerdeck.xnnpack.payload.encoding import FLOAT
from lowerdeck.xnnpack.payload.layout import Layout


@dataclass(slots=True)
class Tracked:
    """What is known of one tensor of the partition.

    Attributes:
        shape: Sizes as torch counts the dimensions.
        data: The data of a constant, else None.
        preferred: The layout in which the tensor came to be.
        ids: The values that hold it as ``encoding`` says, by layout.
        encoding: How the tensor came to be stored; exactly these numbers are its elements.
        twins: The same tensor stored otherwise, made when first needed.
        derived: What was computed of it that several readers need, under keys of their own.
    """

    shape: tuple[Dim, ...]
    data: torch.Tensor | Quantized | None = None
    preferred: Layout = Layout.PLAIN
    ids: dict[Layout, int] = field(default_factory=dict)
    encoding: XnnEncoding = FLOAT
    twins: dict[XnnEncoding, Tracked] = field(default_factory=dict)
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
