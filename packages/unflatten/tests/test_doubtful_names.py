"""Decomposing gives names that signatures use to other values: no module is given another's."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from unflatten_comparison import assert_equal  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

X = torch.randn(2, 4)


class Taken(nn.Module):
    """Returns what a branch gives, or one result of an operator of several."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor
        if self.kind == "none":
            found = x * 2
        elif self.kind == "cond":
            found = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        elif self.kind == "chunk":
            found = torch.cat([x, x + 1]).chunk(2)[1]
        elif self.kind == "max":
            found = x.unsqueeze(0).max(0)[0]
        else:
            found = x.expand(3, 2, 4).unbind()[1]
        return found


class Adds(nn.Module):
    """May or may not read its second argument."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        found: Tensor = self.fc(x)
        return found * other if self.reads else found


class Net(nn.Module):
    """Norms before and after what is taken out, whose results become taken out too."""

    def __init__(self, kind: str, before: int, after: int, reads: bool) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.LayerNorm(4) for _ in range(before)))
        self.taken = Taken(kind)
        self.child = Adds(reads)
        self.last = Adds(not reads)
        self.after = nn.Sequential(*(nn.LayerNorm(4) for _ in range(after)), nn.Linear(4, 4))
        for parameter in self.parameters():
            nn.init.normal_(parameter)
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x.sin()) if len(self.before) else x
        y = self.taken(x)
        z = self.after(self.child(y, x))
        made: Tensor = self.last(z, y)
        return made


class Logs(nn.Module):
    def __init__(self, inner: nn.Module, log: list[object]) -> None:
        super().__init__()
        self.inner, self.log = inner, log

    def forward(self, *args: Tensor) -> Tensor:
        self.log.append(args)
        found: Tensor = self.inner(*args)
        self.log.append(found)
        return found


# Of each kind and number of norms: whether a value that is none of its own has a result's name.
CASES = {
    "cond": [(0, 1), (0, 2)],
    "chunk": [(0, 1), (2, 1)],
    "max": [(1, 1), (1, 2)],
    "unbind": [(1, 2)],
    "none": [(0, 1), (1, 1), (2, 2)],
}


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("kind", "before", "after"), [(kind, *case) for kind in CASES for case in CASES[kind]]
)
def test_what_is_put_into_a_decomposed_program_is_given_eagers_arguments(
    kind: str, before: int, after: int, reads: bool
) -> None:
    eager = Net(kind, before, after, reads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = unflatten(export_preserving(eager, (X,)).run_decompositions())
    assert_equal(made(X), eager(X))
    for row in made.swappable():
        # An argument that nobody reads may have any name.
        unread = kind == "none" and before and row.path == ("last" if reads else "child")
        if kind == "none" and not unread:
            assert row.replaceable, row
        if row.path not in ("child", "last", "taken"):
            continue
        one, other = copy.deepcopy(eager), copy.deepcopy(made)
        logs: tuple[list[object], list[object]] = ([], [])
        for model, log in zip((one, other), logs, strict=True):
            setattr(model, row.path, Logs(copy.deepcopy(eager.get_submodule(row.path)), log))
        wanted = one(X)
        if not row.replaceable:
            with pytest.raises(UnflattenError, match="decomposing lost what eager's takes"):
                other(X)
            continue
        assert_equal((other(X), logs[1]), (wanted, logs[0]))
