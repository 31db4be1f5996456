"""Lines that ask for a fixed size, or for the rank: a changed result is refused, or eager's.

Whatever such a line does counts as computed of what it asks for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from test_changed_sizes import Code, Model, outcome, program_of  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten
from lowerdeck.unflatten.results.asked_dims import are_asked, asks_rank, dims_asked

pad = nn.functional.pad

COMPUTES: dict[str, Code] = {
    "all but a share": lambda y, _: y.sum() * (1 - 1 / y.shape[1]),
    "an eighth": lambda y, _: y.sum() * (y.shape[1] / 8),
    "a ratio": lambda y, _: y.sum() * (y.shape[1] / y.shape[0]),
    "a root": lambda y, _: y.sum() * y.shape[1] ** 0.25,
    "a square": lambda y, _: y.sum() * (y.size(1) ** 2 + 3),
    "a logarithm of two": lambda y, _: y.sum() * math.log(y.shape[1] * 5),
    "what is left": lambda y, _: y.sum() + torch.arange(100)[: 100 - y.shape[1]].sum(),
    "half and one": lambda y, x: torch.cat([x, y], 1)[:, : y.shape[1] // 2 + 1].sum(),
    "steps": lambda y, _: y.sum() + torch.arange(0, 4 * y.shape[1], 4).sum(),
    "number of parts": lambda y, _: y.chunk(y.shape[1] // 4, 1)[0].amax(),
    "all parts": lambda y, _: sum(each.amax() for each in y.unbind(1)),
    "parts of four": lambda y, _: sum(each.amax() for each in y.split(4, 1)),
    "padded": lambda y, _: pad(y, (0, 0, 0, 17 - y.shape[1])).amax(0).mean(),
    "a tensor": lambda y, _: y.mean() + torch.tensor(y.shape[1]),
    "a tensor of all": lambda y, _: y.mean() + torch.tensor(y.shape).sum(),
    "a tensor of the root": lambda y, _: y.mean() * torch.tensor(math.sqrt(y.shape[1])),
    "all elements": lambda y, _: y.sum() / (y.numel() + 7),
    "length": lambda y, _: y.sum() / (len(y.transpose(0, 1)) + 7),
    "from the end": lambda y, _: y.sum() * (1 - 1 / y.shape[-2]),
    "of a part": lambda y, _: y.split(4, 2)[0].sum() * (1 - 1 / y.split(4, 2)[0].shape[1]),
    "written in place": lambda y, _: y.mul_(2).sum() * (1 - 1 / y.shape[1]),
    "turned": lambda y, _: y.mT.sum() * (1 - 1 / y.mT.shape[2]),
    "the largest": lambda y, _: y.sum() / max(y.shape),
    "a root of the rest": lambda y, _: y.sum(1) ** (y.shape[1] / 3),
    "a correction": lambda y, _: y.std(1, correction=y.shape[1] // 3),
    "a diagonal": lambda y, _: y.tril(y.shape[1] // 3 - 4).sum(1),
    "an option": lambda y, _: torch.add(y, y, alpha=y.shape[1] - 2).sum(1),
    "a branch": lambda y, _: y.sum(1) + (1.0 if y.shape[1] == 12 else 2.0),
    "repeated": lambda y, _: torch.cat([y] * (y.shape[1] // 6), 1).sum(1),
    "padding": lambda y, _: nn.functional.avg_pool1d(y.mT, 9, 1, y.shape[1] // 3).mean(2),
    "clamped": lambda y, _: y.sum() * min(y.shape[1] + 20, 100),
}


def computing(code: Code) -> nn.Module:
    """Return a model whose own code that is: export tells no lines but those of a ``forward``."""
    of_forward: Any = FunctionType(code.__code__.replace(co_name="forward"), globals())
    model: nn.Module = Model(of_forward).eval()
    return model


def rows(y: torch.Tensor, dim: int) -> torch.Tensor:
    """Return every second of a tensor along a dimension."""
    return y.index_select(dim, torch.arange(0, y.shape[dim], 2))


CUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tokens": lambda y: rows(y, 1),
    "batch": lambda y: rows(y, 0),
    "both": lambda y: rows(rows(y, 0), 1),
    "more tokens": lambda y: torch.cat([y, y], 1),
}


@pytest.mark.parametrize("how", ["preserving", "plain", "flat"])
@pytest.mark.parametrize("name", COMPUTES)
def test_a_changed_size_is_refused_or_eagers(name: str, how: str) -> None:
    """Of these, what equals no size and nothing that is often computed of one went on."""
    x = torch.randn(6, 12, 8)
    model = computing(COMPUTES[name])
    whole = program_of(model, x, how, "fixed")
    torch.testing.assert_close(whole(x), model(x))
    for cut, change in CUT.items():
        module, eager = copy.deepcopy(whole), copy.deepcopy(model)
        for each in (module, eager):
            each.get_submodule("body").register_forward_hook(
                lambda _, __, result, change=change: change(result)
            )
        try:
            want = eager(x)
        except (RuntimeError, IndexError):
            continue
        found = outcome(partial(module, x), want)
        assert found == "refused" or cut == "batch", cut


PASSES: dict[str, Code] = {
    "another dimension": lambda y, _: y.sum() * (1 - 1 / y.shape[2]),
    "heads": lambda y, _: y.reshape(y.shape[0], -1, 4, 2).softmax(1) * 3.5,
    "written": lambda y, _: y.sum(1) * 0.25 / y.shape[2] + 7,
    "a written tensor": lambda y, _: (y.sum(1) * torch.tensor([0.5, 0.25] * 4)) / y.shape[2],
    "the rank": lambda y, _: y.mean(1) * len(y.shape) * 2.5,
    "two parts": lambda y, _: y.chunk(2, 1)[0].mean(1) + y.chunk(2, 1)[1].mean(1),
    "the first part": lambda y, _: y.unbind(1)[0] + y.split(4, 1)[0].mean(1),
    "attention": lambda y, _: (y @ y.mT / math.sqrt(y.size(-1))).softmax(-1) @ y,
}


@pytest.mark.parametrize("how", ["preserving", "plain", "flat"])
@pytest.mark.parametrize("name", PASSES)
def test_what_asks_for_another_size_passes(name: str, how: str) -> None:
    x = torch.randn(5, 12, 8)
    model = computing(PASSES[name])
    module, eager = program_of(model, x, how, "fixed"), copy.deepcopy(model)
    for each in (module, eager):
        each.get_submodule("body").register_forward_hook(lambda _, __, result: rows(result, 1))
    assert outcome(partial(module, x), eager(x)) == "equal"


class Rows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[None] * 1


class RootOfAll(nn.Module):
    """Fixes a product of sizes that vary, where Python computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y.mean() * math.sqrt(y.shape[1])


@pytest.mark.parametrize("export", [export_preserving, torch.export.export])
@pytest.mark.parametrize("strict", [False, True])
def test_a_number_that_export_fixed(export: Any, strict: bool) -> None:
    x = torch.randn(5, 12, 8)
    sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    module = unflatten(export(RootOfAll(), (x,), dynamic_shapes=sizes, strict=strict))
    torch.testing.assert_close(module(x), RootOfAll()(x))
    module.get_submodule("body").register_forward_hook(lambda _, __, result: rows(result, 1))
    with pytest.raises(InputConstraintError, match=r"sqrt\(y.shape\[1\]\)"):
        module(x)


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("y * (1 - 1 / y.shape[1])", {1}),
        ("y.size(-1) ** 0.5", {2}),
        ("y.size(dim=0)", {0}),
        ("b, t = y.shape[:2]", {0, 1}),
        ("y.view(*y.shape[:-1], self.heads, -1)", {0, 1}),
        ("len(y) + 1", {0}),
        ("y.numel()", {0, 1, 2}),
        ("b, t, c = y.shape", {0, 1, 2}),
        ("y.size()[at]", {0, 1, 2}),
        ("y.view(-1, *y.size()[1:])", {1, 2}),
        ("y.size()", {0, 1, 2}),
        ("y.shape[self.at]", {0, 1, 2}),
        ("y * batch_size(y)", {0, 1, 2}),
        ("range(1, len(y.shape))", set()),
        ("y.reshape(4, self.window_size)", set()),
        ("y.view(hidden_shape)", set()),
        ("y * 2", set()),
        ("", set()),
    ],
)
def test_what_a_line_asks_for(line: str, asked: set[int]) -> None:
    dims = dims_asked(line)
    assert {dim for dim in range(3) if are_asked(dims, dim, 3)} == asked


@pytest.mark.parametrize(
    ("line", "is_made_there"),
    [
        ("(y @ y.mT / math.sqrt(y.size(-1))).softmax(-1)", False),
        ("self.mask.shape[2] * y", False),
        ("len(self.mask) * y", False),
        ("y.mT.shape[1]", True),
        ("y.mT.size(1)", True),
        ("y[0].shape[1]", True),
        ("f(y).shape[1]", True),
        ("len(y.mT)", True),
        ("len(f(y))", True),
        ("size_of(y)", True),
    ],
)
def test_whether_a_line_asks_what_it_makes(line: str, is_made_there: bool) -> None:
    dims = dims_asked(line)
    found = any(are_asked(dims, dim, 3, is_made_there=True) for dim in range(3))
    assert found is is_made_there


RANKS: dict[str, Code] = {
    "the last": lambda y, _: y[..., 0],
    "before the last": lambda y, _: y[..., None, :].sum(-1),
    "no dimension said": lambda y, _: nn.functional.softmax(y, _stacklevel=5),
    "all but the first": lambda y, _: y.sum(tuple(range(1, y.ndim))),
    "added in front of the last": lambda y, _: y.unsqueeze(y.dim() - 1).mean(-1),
    "turned round": lambda y, _: y.permute(*range(y.dim() - 1, -1, -1)).sum(-1),
    "a branch": lambda y, _: y.sum() * (2 if len(y.shape) == 3 else 3),
}
KEEP_RANK: dict[str, Code] = {
    "written": lambda y, _: y.sum(1) + y.transpose(0, 1).mean(0),
    "subscript": lambda y, _: y[0] + y[:, 0].sum(),
    "from the last": lambda y, _: y.softmax(-1).sum(dim=-2),
    "all": lambda y, _: torch.relu(y * 2 + 1).sum(),
    "flat": lambda y, _: y.flatten(1).mean(1),
}


def more_dims(y: torch.Tensor) -> torch.Tensor:
    return torch.stack([y, 2 * y], 1)


def fewer_dims(y: torch.Tensor) -> torch.Tensor:
    return y[0]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("change", [more_dims, fewer_dims])
@pytest.mark.parametrize("sizes", ["fixed", "t"])
@pytest.mark.parametrize("how", ["preserving", "plain"])
@pytest.mark.parametrize("name", [*RANKS, *KEEP_RANK])
def test_another_rank_is_refused_or_eagers(
    name: str, how: str, sizes: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.randn(6, 12, 8)
    model = computing({**RANKS, **KEEP_RANK}[name])
    module, eager = program_of(model, x, how, sizes), copy.deepcopy(model)
    torch.testing.assert_close(module(x), eager(x))
    for each in (module, eager):
        each.get_submodule("body").register_forward_hook(lambda _, __, result: change(result))
    if name in RANKS:
        with pytest.raises(InputConstraintError, match="recorded with a tensor of"):
            module(x)
    else:
        torch.testing.assert_close(module(x), eager(x))


@pytest.mark.parametrize(
    ("line", "is_asked"),
    [
        ("y.ndim - 1", True),
        ("y.dim() == 3", True),
        ("len(x.y.shape)", True),
        ("y[..., :half]", True),
        ("y.sum(dim=1)", False),
        ("y.ndims", False),
        ("y[:, 0].shape[1]", False),
    ],
)
def test_lines_that_ask_for_the_rank(line: str, is_asked: bool) -> None:
    assert asks_rank(line) is is_asked


def _share(y: torch.Tensor) -> torch.Tensor:
    return y * (1 - 1 / y.shape[1]) + y[..., :1]


class Branches(nn.Module):
    """Asks in a branch of torch's, which has a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        return torch.cond(y.sum() > 0, _share, torch.neg, (y,)).sum(1)


@pytest.mark.parametrize("change", [more_dims, lambda y: rows(y, 1)])
def test_what_a_branch_asks_is_not_looked_through(change: Any) -> None:
    x = torch.randn(6, 12, 8)
    module: Any = unflatten(export_preserving(Branches().requires_grad_(False), (x,)))
    module.body.register_forward_hook(lambda _, __, result: change(result))
    with pytest.raises(InputConstraintError, match="recorded with a tensor of"):
        module(x)
