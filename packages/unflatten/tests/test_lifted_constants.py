"""Modules that make constants anew in each call: equal ones are no reason for several forms."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from lowerdeck.unflatten import (
    InterpreterModuleDispatcher,
    export_preserving,
    unflatten,
)

Export = Callable[..., ExportedProgram]


class Makes(nn.Module):
    """Makes tensors of numbers, one of them in another mode, and writes into one."""

    def forward(self, x: Tensor, more: float = 0.0) -> Tensor:
        table = torch.zeros(2, 3)
        table[0, :] = torch.tensor([1.0, 2.0, float("nan")])
        with torch.no_grad():
            half = x + torch.tensor(0.5)
        one = torch.tensor(1 + more)
        return x * torch.tensor(2j).abs() + table.nan_to_num() + half + one.add_(1)


class Calls(nn.Module):
    """Calls a module that makes constants, and one of the same class, again and again."""

    def __init__(self, *more: float) -> None:
        super().__init__()
        self.makes, self.other, self.more = Makes(), Makes(), more

    def forward(self, x: Tensor) -> Any:
        for more in self.more:
            x = self.makes(x, more)
        return self.other(x)


WAYS = [
    pytest.param(how, strict, id=f"{how.__name__}, {'strict' if strict else 'non-strict'}")
    for how in (export, export_preserving)
    for strict in (False, True)
]


@pytest.mark.parametrize(("how", "strict"), WAYS)
@pytest.mark.parametrize("is_decomposed", [False, True])
def test_calls_that_make_equal_constants_are_one_form(
    how: Export, strict: bool, is_decomposed: bool
) -> None:
    eager, x = Calls(0.0, 0.0, 0.0), torch.randn(2, 3)
    program = how(eager, (x,), strict=strict)
    program = program.run_decompositions() if is_decomposed else program
    made: Any = unflatten(program)
    # Once more: a constant that is written would have another value then.
    for _ in range(2):
        torch.testing.assert_close(made(x), eager(x))
    assert not isinstance(made.makes, InterpreterModuleDispatcher)
    held = [name for name, value in vars(made.makes).items() if isinstance(value, Tensor)]
    assert len(held) == 4
    assert list(made.state_dict()) == []
    # Strict export leaves no trace of the module around what ran without gradients: once
    # decomposed, its caller computes that, where no signature tells what the module takes.
    if not (strict and is_decomposed and how is export):
        given = (x, 0.0) if how is export_preserving else (x,)
        torch.testing.assert_close(made.makes(*given), eager.makes(*given))


@pytest.mark.parametrize(("how", "strict"), WAYS)
def test_calls_that_make_other_constants_are_several(how: Export, strict: bool) -> None:
    eager, x = Calls(0.0, 1.0, 0.0), torch.randn(2, 3)
    buffer = io.BytesIO()
    torch.export.save(how(eager, (x,), strict=strict), buffer)
    buffer.seek(0)
    made = unflatten(torch.export.load(buffer))
    torch.testing.assert_close(made(x), eager(x))
    assert isinstance(made.makes, InterpreterModuleDispatcher)
    assert len(made.makes.call_modules()) == 2
