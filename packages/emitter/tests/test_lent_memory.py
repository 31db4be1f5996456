"""Names that overlap in memory through two storages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.emitter import UnsupportedError, emit


class Lent(nn.Module):
    """Two buffers on one memory that somebody lent, from different offsets on."""

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
    raw = exported(4, writes=True)
    with pytest.raises(UnsupportedError, match=r"'low' and 'high' overlap.*'add_'"):
        emit(raw)
    with pytest.raises(UnsupportedError, match=r"'(high|low)'.*'(high|low)'.*two storages"):
        emit(raw.run_decompositions({}))


def test_without_a_write_or_without_an_overlap_all_is_well() -> None:
    assert emit(exported(4, writes=False)).to_bytes()
    assert emit(exported(6, writes=True)).to_bytes()


class Overlapping(nn.Module):
    """Two buffers that overlap in one storage."""

    whole: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.register_buffer("whole", memory[:6])
        self.register_buffer("part", memory[2:])

    def forward(self, x: Tensor) -> Tensor:
        """Return what the write to the one shows of the other."""
        self.whole.add_(x)
        return self.part * 2


def test_a_write_that_another_name_shows_a_part_of_is_refused_by_both_names() -> None:
    with pytest.raises(UnsupportedError, match=r"'whole' and 'part' overlap.*'add_'"):
        emit(torch.export.export(Overlapping(), (torch.ones(6),)))
