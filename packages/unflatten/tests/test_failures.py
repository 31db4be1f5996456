"""An operator that fails in generated code names the line of the model in its own message."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import InputConstraintError, unflatten


class Inner(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.relu(self.inner(x, index))


def test_the_message_names_the_line_of_the_model() -> None:
    made = unflatten(torch.export.export(Outer(), (torch.ones(3, 2), torch.tensor([1]))))
    lines, start = inspect.getsourcelines(Inner)
    number = start + next(i for i, line in enumerate(lines) if "index_select" in line)
    with pytest.raises(IndexError) as failed:
        made(torch.ones(3, 2), torch.tensor([7]))
    message = str(failed.value)
    assert "out of range" in message
    assert f"test_failures.py:{number} in forward: return x.index_select(0, index)" in message
    assert message.count("test_failures.py") == 1


def test_other_errors_stay_as_they_are() -> None:
    made = unflatten(torch.export.export(Outer(), (torch.ones(3, 2), torch.tensor([1]))))
    with pytest.raises(InputConstraintError) as failed:
        made(torch.ones(4, 2), torch.tensor([1]))
    assert "test_failures" not in str(failed.value)
