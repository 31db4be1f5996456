"""Graphs, and the graph modules that they hold, pickle whatever traced them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from lowerdeck.unflatten import unflatten


class Branches(nn.Module):
    """A branch in a branch, with parameters of the module in it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        def inner(x: Tensor) -> Any:
            return torch.cond(
                x.mean() > 0.5, lambda x: self.fc(x).sin(), lambda x: x * 2 + 0.5, (x,)
            )

        return torch.cond(x.sum() > 0, inner, torch.cos, (x,))


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_with_branches_pickles(strict: bool) -> None:
    module = unflatten(export(Branches(), (torch.ones(1, 2),), strict=strict))
    once = pickle.loads(pickle.dumps(module))
    twice = pickle.loads(pickle.dumps(once))
    for scale in (1.0, 0.1, -1.0):
        x = torch.ones(1, 2) * scale
        expected = module(x)
        torch.testing.assert_close(once(x), expected)
        torch.testing.assert_close(twice(x), expected)
