"""How far the outputs of a lowered model are from those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class OutputAccuracy:
    """One output beside that of the model in float.

    Attributes:
        largest: Largest absolute difference, infinite where the shapes differ.
        mean: Mean absolute difference.
        cosine: Cosine of the angle between both, taken as vectors.
    """

    largest: float
    mean: float
    cosine: float

    def __str__(self) -> str:
        return f"max {self.largest:.3g}, mean {self.mean:.3g}, cosine {self.cosine:.6f}"


def accuracy_of(found: Sequence[Any], wanted: Sequence[Any]) -> tuple[OutputAccuracy, ...]:
    """Return how far each output is from what is wanted.

    Args:
        found: Outputs of the lowered model.
        wanted: Outputs of the model.
    """
    nothing_alike = OutputAccuracy(float("inf"), float("inf"), 0.0)
    if len(found) != len(wanted):
        return (nothing_alike,)
    return tuple(
        _of_tensors(one, other)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        else OutputAccuracy(0.0, 0.0, 1.0)
        if type(one) is type(other) and one == other
        else nothing_alike
        for one, other in zip(found, wanted, strict=True)
    )


def _of_tensors(one: torch.Tensor, other: torch.Tensor) -> OutputAccuracy:
    if one.shape != other.shape:
        return OutputAccuracy(float("inf"), float("inf"), 0.0)
    if not other.numel() or torch.equal(one, other):
        return OutputAccuracy(0.0, 0.0, 1.0)
    one, other = one.to(torch.float64).flatten(), other.to(torch.float64).flatten()
    alike = (one == other) | (one.isnan() & other.isnan())
    difference = (one - other).abs().masked_fill(alike, 0.0).nan_to_num(nan=float("inf"))
    cosine = torch.nn.functional.cosine_similarity(one, other, dim=0)
    return OutputAccuracy(float(difference.max()), float(difference.mean()), float(cosine))
