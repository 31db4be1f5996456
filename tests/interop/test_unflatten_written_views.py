"""Programs of ``lowerdeck.decompose`` in which a view that a module returned is made anew."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.decompose import decompose
from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Rows(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[1:].t()


class Flat(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.view(-1),)


class Writes(nn.Module):
    def __init__(self, child: nn.Module, how: str) -> None:
        super().__init__()
        self.work, self.child, self.how = nn.Linear(4, 4), child, how

    def forward(self, x: Tensor) -> Any:
        y = self.work(x)
        view = self.child(y)[-1]
        before = view + 1 if self.how == "read" else 0
        (view if self.how == "result" else y).add_(1)
        return view * 2 + before, y


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(-1.5 * leaf for leaf in self.inner(x))


@pytest.mark.parametrize("how", ["read", "argument", "result"])
@pytest.mark.parametrize("child", [Rows, Flat])
def test_changes_of_what_returned_such_a_view_are_refused(
    child: type[nn.Module], how: str
) -> None:
    """They computed with the view that was made anew; some programs were no longer unflattened."""
    eager, x = Writes(child(), how), torch.randn(3, 4)
    program = decompose(export_preserving(eager, (x,)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = unflatten(program)
    torch.testing.assert_close(module(x), eager(x))
    (row,) = [row for row in module.swappable() if row.path == "child"]
    assert not row.replaceable
    for other in (child(), Around(module.child)):
        changed = copy.deepcopy(module)
        changed.child = other
        with pytest.raises(UnflattenError, match=r"'child', which .* run_decompositions"):
            changed(x)
