"""Memory that is used again and results computed at emit time give eager's numbers.

Each case kills a mutant of the passes that the other tests let live.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck.serializer import KernelCall
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

ROWS = torch.tensor([2, 0, 3, 1])
WHERE = torch.tensor([[1, 0, 2], [2, 2, 0], [3, 1, 1], [0, 3, 3]])
BASE = torch.arange(12.0).view(4, 3)


def _filled(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = rows.squeeze()
    same.t()[1].fill_(0.25)
    return rows.softmax(-1), same


def _row(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return row.sin() + other.sum()


def _written(rows: torch.Tensor) -> torch.Tensor:
    part = rows[:2]
    part[ROWS[3:]] = 0.5
    return part


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    # What is written into stays, what is written dies: only the first may lend its memory.
    "index_put, values die": lambda x: (torch.index_put(x + 1, (ROWS,), x * 2), x),
    "index_put, a constant": lambda x: torch.index_put(BASE, (ROWS[:2].repeat(2),), x * 2),
    "scatter, source dies": lambda x: torch.scatter(x, 0, WHERE, x * 3),
    "scatter, self is read later": lambda x: (y := x + 1).scatter(0, WHERE, x * 3) + y,
    "slice_scatter": lambda x: torch.slice_scatter(x, x * 2, 0, 0, 4) + x,
    "slice_scatter of a part": lambda x: torch.slice_scatter(x + 1, (x * 2)[:2], 0, 1, 3),
    "select_scatter": lambda x: torch.select_scatter(x + 1, x[0] * 2, 0, -1),
    # A result that grows row by row has parts before and after it is written in place.
    "rows of a map, written": lambda x: _written(map_rows(_row, x, x[0] + 1)),
    "rows of a map, filled": lambda x: _filled(map_rows(_row, x, x[0] + 1)),
    "one value twice": lambda x: torch.index_put(y := x + 1, (ROWS,), y),
    "a sum of two that die": lambda x: (x * 2) - (x + 3),
    "division by what dies": lambda x: (x + 1) / (x * 2 + 5),
    "where": lambda x: torch.where(x > 1, x * 2, x - 3),
    "broadcast": lambda x: (x * 2) - (x[0] * 3),
    # Arguments by keyword, which a result at emit time must not lose.
    "types": lambda x: (
        x + torch.arange(3, dtype=torch.float64),
        torch.full((3,), 2, dtype=torch.int32) + 1,
        torch.ones(3, dtype=torch.int16).sum(dtype=torch.float32) + x,
        torch.add(BASE[0], BASE[1], alpha=3) + x,
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


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def emitted_of(function: Callable[..., Any], x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return emit(torch.export.export(Of(function), (x,)))


@pytest.mark.parametrize("name", CASES)
def test_a_result_equals_eagers(name: str, tmp_path: Path) -> None:
    function, x = CASES[name], torch.arange(12.0).view(4, 3) / 3 - 1
    emitted = emitted_of(function, x)
    emitted.save(tmp_path / "model.pte")
    expected = pytree.tree_leaves(function(x.clone()))
    for source in (emitted.to_bytes(), tmp_path / "model.pte"):
        outcome = official.run(source, [official.Call((x,))] * 2)
        assert isinstance(outcome, official.Ran), outcome
        for got in outcome.outputs:
            assert_close(got, expected)
    strict = load(emitted.to_bytes(), memory="strict").method("forward")
    assert_close(list(strict.run_flat([x])), expected)


SHARED: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[int, ...]]] = {
    "permute": (lambda x: (x + 1).permute(1, 0, 2) * 2, (1, 4, 3)),
    "transpose": (lambda x: (x + 1).transpose(0, 2) * 2, (1, 1, 3)),
    "t": (lambda x: (x + 1).t() * 2, (1, 3)),
    "select": (lambda x: (x + 1)[-1] * 2, (4, 3)),
    "slice": (lambda x: (x + 1)[-2:] * 2, (4, 3)),
    "inner slice": (lambda x: (x + 1)[:, 1:3] * 2, (1, 4, 3)),
    "reshape": (lambda x: (x + 1).reshape(3, 4) * 2, (4, 3)),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_needs_no_copy_takes_no_kernel(name: str) -> None:
    function, shape = SHARED[name]
    plan = emitted_of(function, torch.randn(shape)).program.execution_plan[0]
    steps = [step.instr_args for step in plan.chains[0].instructions]
    assert sum(isinstance(step, KernelCall) for step in steps) == 2
