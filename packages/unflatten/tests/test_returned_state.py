"""Modules that return what they hold: their callers may read it from them or from the result."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Position(nn.Module):
    def __init__(self, times: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("n", torch.zeros(1))
        self.n: Tensor
        self.times = times

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        self.n.add_(1)
        w = self.w if self.times == 1.0 else self.w * self.times
        return w, {"n": self.n}, x + 1


class Result(nn.Module):
    """Reads the results."""

    def __init__(self) -> None:
        super().__init__()
        self.pos: Any = Position()

    def forward(self, x: Tensor) -> Tensor:
        w, more, y = self.pos(x)
        found: Tensor = y * w + more["n"]
        return found


class Attribute(Result):
    """Reads what the module holds."""

    def forward(self, x: Tensor) -> Tensor:
        _, _, y = self.pos(x)
        found: Tensor = y * self.pos.w + self.pos.n
        return found


class Deep(nn.Module):
    """The caller of the caller reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.block: Any = nn.Sequential(Position())

    def forward(self, x: Tensor) -> Tensor:
        w, _, y = self.block(x)
        found: Tensor = y * w
        return found


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [Result, Attribute, Deep])
def test_another_module_returns_it_too_or_is_told(make: type[Any], strict: bool) -> None:
    eager, x = make(), torch.randn(3, 4)
    path = "block.0" if make is Deep else "pos"
    program = export_preserving(copy.deepcopy(eager), (x,), strict=strict)
    row = next(row for row in unflatten(program).swappable() if row.path == path)
    assert row.replaceable
    assert "must return as its result[0]" in row.reason
    module, wanted, other = unflatten(program), copy.deepcopy(eager), Position()
    module.set_submodule(path, other)
    wanted.set_submodule(path, copy.deepcopy(other))
    for _ in range(2):
        torch.testing.assert_close(module(x), wanted(x))
    module = unflatten(program)
    module.set_submodule(path, Position(5.0))
    with pytest.raises(UnflattenError, match=r"returned as its result\[0\] something else"):
        module(x)
    module = unflatten(program)
    double: Any = lambda *given: (given[-1][0] * 2, *given[-1][1:])  # noqa: E731
    module.get_submodule(path).register_forward_hook(double)
    with pytest.raises(UnflattenError, match=r"returned as its result\[0\] something else"):
        module(x)


@pytest.mark.parametrize("make", [Result, Attribute, Deep])
def test_what_nobody_replaced_is_never_refused(make: type[Any]) -> None:
    eager, x = make(), torch.randn(3, 4)
    module = unflatten(export_preserving(copy.deepcopy(eager), (x,)))
    wanted = eager(x)
    for made in (
        copy.deepcopy(module),
        torch.fx.symbolic_trace(copy.deepcopy(module)),
        torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True),
        pickle.loads(pickle.dumps(module)),
        torch.export.export(copy.deepcopy(module), (x,)).module(),
    ):
        torch.testing.assert_close(made(x), wanted)


class Only(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self) -> Tensor:
        return self.w


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only: Any = Only()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.only()
        return found


def test_a_module_that_returns_nothing_else_says_why_it_is_not_called() -> None:
    module = unflatten(export_preserving(Adds(), (torch.randn(3, 4),)))
    (row,) = module.swappable()
    assert not row.replaceable
    assert row.reason.startswith("returns what it is given or holds")
