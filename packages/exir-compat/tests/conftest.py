"""What all tests of this package use."""

from __future__ import annotations

import pytest
import torch
from torch.export import ExportedProgram


class Counting(torch.nn.Module):
    """A layer, and state that is read and changed."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.linear(x))
        self.total.add_(y.sum(0))
        return y + self.total


@pytest.fixture
def inputs() -> tuple[torch.Tensor]:
    """Inputs of the model."""
    return (torch.ones(2, 4),)


@pytest.fixture
def counting() -> Counting:
    """A model with state."""
    torch.manual_seed(0)
    return Counting().eval()


@pytest.fixture
def exported(counting: Counting, inputs: tuple[torch.Tensor]) -> ExportedProgram:
    """The program of the model."""
    return torch.export.export(counting, inputs)
