"""Programs of ``lowerdeck.decompose`` with marks of calls without gradients, and remade views."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.decompose import decompose
from lowerdeck.unflatten import unflatten


class GivesBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(0.25)


class GivesView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Any:
        return self.seen.add_(x)  # type: ignore[operator]


class Frozen(nn.Module):
    """Calls a child without gradients, and reads its argument by more than one name."""

    def __init__(self, child: nn.Module, *, writes: bool) -> None:
        super().__init__()
        self.child, self.writes = child, writes

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.child(x)
        made = y.sin() * 2
        if self.writes:
            x.mul_(0.5)
        return made + 1


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("child", [GivesBack, GivesView, Counts])
def test_what_is_marked_is_written_back_after_its_last_reader(
    child: type[nn.Module], writes: bool
) -> None:
    """A marked value that is written back was a ``KeyError``."""
    eager, x = Frozen(child(), writes=writes), torch.randn(3, 4)
    exported = torch.export.export(
        copy.deepcopy(eager), (x.clone(),), preserve_module_call_signature=("child",)
    )
    program = decompose(exported)
    mark = torch.ops.higher_order._export_tracepoint
    assert program.graph.find_nodes(op="call_function", target=mark)
    module = unflatten(program)
    for _ in range(2):
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(module(mine), eager(theirs))
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(dict(module.named_buffers()), dict(eager.named_buffers()))


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
