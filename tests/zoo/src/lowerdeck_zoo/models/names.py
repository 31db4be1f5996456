# ruff: noqa: A002, A006
"""Inputs, buffers and outputs that are called as something of Python's is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from lowerdeck_zoo.program import Holding, Of, Program, drawn


class Builtins(Holding, layer=lambda: nn.Linear(4, 4), sum=lambda: torch.zeros(4)):
    """Every input, a buffer and an output are called as something of Python's is."""

    def forward(self, input: Tensor, dict: dict[str, Tensor], max: Tensor) -> Any:
        self.sum.add_(input[0])
        return self.layer(input) @ dict["id"].mT, max * self.sum, max


class Shifted(nn.Module):
    def forward(self, input: Tensor, input_1: Tensor) -> Tensor:
        return (input - input_1).relu()


def _branches(input: Tensor, max: Tensor) -> Tensor:
    return torch.cond(
        input.sum() > 0, lambda input, max: input + max, lambda input, max: max * 2, (input, max)
    )


def _named(rows: int = 3, others: int = 2) -> tuple[Any, ...]:
    return torch.randn(rows, 4), {"id": torch.randn(others, 4)}, torch.randn(rows, 4)


_ROWS = Dim("rows", min=2, max=8)

PROGRAMS = (
    Program("builtins", Builtins, drawn(_named), tags="in-place stateful"),
    Program(
        "builtins_of_any_size",
        Builtins,
        lambda: [_named(n, n) for n in (3, 2, 8)],
        ({0: _ROWS}, {"id": {0: _ROWS}}, {0: _ROWS}),
        tags="dynamic in-place stateful",
    ),
    Program("shifted_names", Shifted, drawn(lambda: (torch.randn(3), torch.randn(3)))),
    Program(
        "branches_of_builtins",
        lambda: Of(_branches),
        lambda: [(torch.randn(3, 4) + sign, torch.randn(3, 4)) for sign in (1, -1, 1)],
        tags="control-flow",
    ),
)
