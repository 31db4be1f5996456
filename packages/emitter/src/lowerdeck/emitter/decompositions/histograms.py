"""Histograms: mixtures of experts count the tokens of each expert with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten


def histogram(
    self: torch.Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - the name in the schema
    max: float = 0,  # noqa: A002 - the name in the schema
) -> Any:
    """Return ``histc``: the number of elements in each of several equal bins.

    Args:
        min: Start of the first bin.
        max: End of the last bin, which includes it.
    """
    if min >= max:
        # The range is that of the elements.
        return NotImplemented
    kind = self.dtype if self.is_floating_point() else torch.float32
    edges = torch.linspace(min, max, bins + 1, dtype=kind)
    values = self.reshape(-1, 1).to(kind)
    above, below = values >= edges[:-1], values < edges[1:]
    last = (values == edges[-1]) & (torch.arange(bins) == bins - 1)
    return ((above & below) | last).to(self.dtype).sum(0).to(self.dtype)


HISTOGRAMS: dict[OpOverload, Callable[..., Any]] = {_ATEN.histc.default: histogram}
