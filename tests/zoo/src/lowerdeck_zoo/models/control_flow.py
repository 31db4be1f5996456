"""Models with branches and loops in the graph."""

from __future__ import annotations

import torch
from functorch.experimental.control_flow import map as torch_map
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from lowerdeck_zoo.program import Holding, Of, Program, drawn, normal


def _signs():
    return [(torch.randn(3) + shift,) for shift in (2.0, -2.0, 2.0)]


class Branch(Holding, yes=lambda: nn.Linear(3, 3), no=lambda: nn.Linear(3, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda t: self.yes(t).sin(), lambda t: self.no(t).cos(), (x,))
        return y * 2


def _two_branches(x: torch.Tensor) -> torch.Tensor:
    a = torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos(), (x,))
    b = torch.cond(x.sum() > 0, lambda t: t.exp(), lambda t: t + 1, (x,))
    return a + b


def _nested(x: torch.Tensor) -> torch.Tensor:
    def inner(t: torch.Tensor) -> torch.Tensor:
        return torch.cond(t[0] > 2, lambda u: u * 3, lambda u: u - 3, (t,))

    return torch.cond(x.sum() > 0, inner, lambda t: t + 0.5, (x,))


def _branch_of_two(x: torch.Tensor):
    return torch.cond(x.sum() > 0, lambda t: (t + 1, t * 2), lambda t: (t - 1, t / 2), (x,))


def _loop(x: torch.Tensor) -> torch.Tensor:
    steps = torch.zeros((), dtype=torch.int64)
    _, y = while_loop(lambda i, _: i < 4, lambda i, t: (i + 1, t * 1.5 + i), (steps, x))
    return y


def _until(x: torch.Tensor) -> torch.Tensor:
    (y, _) = while_loop(
        lambda t, s: s.sum() < 50, lambda t, s: (s.clone(), s + t.abs() + 1), (x, x.abs())
    )
    return y


def _map(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch_map(lambda row, other: row.sin() + other, x, y)


def _scan(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scan(lambda c, row: (c + row, (c * row).clone()), torch.zeros(3), x)


PROGRAMS = (
    Program("cond", Branch, _signs),
    Program("two_conds", lambda: Of(_two_branches), _signs),
    Program("nested_cond", lambda: Of(_nested), _signs),
    Program("cond_of_two_values", lambda: Of(_branch_of_two), _signs),
    Program("while_loop", lambda: Of(_loop), _signs),
    Program("while_loop_parallel_assignment", lambda: Of(_until), _signs),
    Program("map", lambda: Of(_map), drawn(lambda: (torch.randn(4, 3), torch.randn(3)))),
    Program("scan", lambda: Of(_scan), normal(4, 3)),
)
