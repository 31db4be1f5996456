"""Names that overlap in memory are found if one is written, and only then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.torch_base import explicit, written_overlap


class Two(nn.Module):
    """Two buffers on one memory, of which the first is written or not."""

    low: Tensor
    high: Tensor

    def __init__(self, low: slice, high: slice, writes: bool) -> None:
        super().__init__()
        memory = torch.arange(8.0)
        self.register_buffer("low", memory[low])
        self.register_buffer("high", memory[high])
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        """Return what the second shows of the first."""
        if self.writes:
            self.low.add_(x)
        return self.high * self.low + x


@pytest.mark.parametrize(
    ("high", "writes", "found"),
    [
        (slice(2, 6), True, True),
        (slice(2, 6), False, False),
        (slice(4, 8), True, False),
        # Two names of one tensor are one.
        (slice(0, 4), True, False),
    ],
)
def test_a_written_overlap_is_told_by_names(high: slice, writes: bool, found: bool) -> None:
    program = torch.export.export(Two(slice(0, 4), high, writes), (torch.ones(4),))
    overlap = written_overlap(explicit(program))
    assert (overlap is not None) is found
    if overlap is not None:
        assert overlap.names == ("low", "high")
        assert str(overlap).startswith("'low' and 'high' overlap in memory, and 'add_' (aten.add_")
