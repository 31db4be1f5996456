"""What all tests of this package use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck_zoo import Holding


class Counting(Holding, linear=lambda: torch.nn.Linear(4, 4), total=lambda: torch.zeros(4)):
    """A layer, and state that is read and changed."""

    def forward(self, x: torch.Tensor) -> Any:
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
