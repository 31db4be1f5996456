"""Names that overlap in memory through two storages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.emitter import UnsupportedError, emit


class Lent(nn.Module):
    """Two buffers on one memory that somebody lent, from different places on."""

    low: Tensor
    high: Tensor

    def __init__(self, start: int, *, writes: bool) -> None:
        super().__init__()
        memory = bytearray(48)
        self.register_buffer("low", torch.frombuffer(memory, dtype=torch.float32, count=6))
        self.register_buffer(
            "high", torch.frombuffer(memory, dtype=torch.float32, offset=4 * start, count=6)
        )
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        """Return what is seen through the other name."""
        if self.writes:
            self.low.add_(x)
        return self.high * 2 + self.low


def exported(start: int, *, writes: bool) -> torch.export.ExportedProgram:
    return torch.export.export(Lent(start, writes=writes), (torch.ones(6),))


def test_a_write_that_another_storage_would_show_is_refused_by_both_names() -> None:
    with pytest.raises(UnsupportedError, match=r"'high'.*'low'.*|'low'.*'high'.*two storages"):
        emit(exported(4, writes=True))


def test_without_a_write_or_without_an_overlap_all_is_well() -> None:
    assert emit(exported(4, writes=False)).to_bytes()
    assert emit(exported(6, writes=True)).to_bytes()
