"""Numbers computed of a fixed size in any way: a changed result is refused, or eager's.

What a line has that asks for a size, and does not write, counts as computed of that size.
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
from lowerdeck.unflatten.results.asked_dims import are_asked, dims_asked, tensors_written

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
    ("line", "written"),
    [
        ("torch.tensor(0.5) / y.shape[1]", True),
        ("torch.tensor([1, -2.5e3], dtype=y.dtype)", True),
        ("torch.tensor(y.shape[1])", False),
        ("torch.tensor(0.5) + torch.tensor(len(y))", False),
        ("y + self.made(y.shape[1])", False),
    ],
)
def test_tensors_that_a_line_writes(line: str, written: bool) -> None:
    assert tensors_written(line) is written
