"""Values whose memory may be used again, and results that are computed when a file is written.

Each case kills a mutant of the passes that the other programs let live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.map import map as map_rows

from lowerdeck_zoo.program import Of, Program, drawn


def _rows() -> torch.Tensor:
    return torch.tensor([2, 0, 3, 1])


def _where() -> torch.Tensor:
    return torch.tensor([[1, 0, 2], [2, 2, 0], [3, 1, 1], [0, 3, 3]])


def _base() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


def _filled(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = rows.squeeze()
    same.t()[1].fill_(0.25)
    return rows.softmax(-1), same


def _row(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return row.sin() + other.sum()


def _written(rows: torch.Tensor) -> torch.Tensor:
    part = rows[:2]
    part[_rows()[3:]] = 0.5
    return part


_CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    # What is written into stays, what is written dies: only the first may lend its memory.
    "index_put, values die": lambda x: (torch.index_put(x + 1, (_rows(),), x * 2), x),
    "index_put, a constant": lambda x: torch.index_put(_base(), (_rows()[:2].repeat(2),), x * 2),
    "scatter, source dies": lambda x: torch.scatter(x, 0, _where(), x * 3),
    "scatter, self is read later": lambda x: (y := x + 1).scatter(0, _where(), x * 3) + y,
    "slice_scatter": lambda x: torch.slice_scatter(x, x * 2, 0, 0, 4) + x,
    "slice_scatter of a part": lambda x: torch.slice_scatter(x + 1, (x * 2)[:2], 0, 1, 3),
    "select_scatter": lambda x: torch.select_scatter(x + 1, x[0] * 2, 0, -1),
    # A result that grows row by row has parts before and after it is written in place.
    "rows of a map, written": lambda x: _written(map_rows(_row, x, x[0] + 1)),
    "rows of a map, filled": lambda x: _filled(map_rows(_row, x, x[0] + 1)),
    "one value twice": lambda x: torch.index_put(y := x + 1, (_rows(),), y),
    "a sum of two that die": lambda x: (x * 2) - (x + 3),
    "division by what dies": lambda x: (x + 1) / (x * 2 + 5),
    "where": lambda x: torch.where(x > 1, x * 2, x - 3),
    "broadcast": lambda x: (x * 2) - (x[0] * 3),
    # Arguments by keyword, which a result at emit time must not lose.
    "types": lambda x: (
        x + torch.arange(3, dtype=torch.float64),
        torch.full((3,), 2, dtype=torch.int32) + 1,
        torch.ones(3, dtype=torch.int16).sum(dtype=torch.float32) + x,
        torch.add(_base()[0], _base()[1], alpha=3) + x,
        torch.zeros(2, dtype=torch.bool) | True,
    ),
    "numbers that are alike": lambda x: (
        x + torch.full((20, 20), 1.0).sum(),
        x + torch.full((20, 20), True).sum(),
        x + torch.full((20, 20), -0.0).sum(),
    ),
    "large constants": lambda x: (
        x + torch.ones(30, 40).tril().sum(1)[:3] + torch.ones(30, 40).sum()
    ),
}


PROGRAMS = tuple(
    Program(
        name.replace(",", "").replace(" ", "_"),
        lambda function=function: Of(function),
        drawn(lambda: (torch.arange(12.0).view(4, 3) / 3 - torch.rand(()),)),
        tags="control-flow in-place" if name.startswith("rows of a map") else "",
    )
    for name, function in _CASES.items()
)
