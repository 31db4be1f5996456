"""Inputs and outputs of every structure."""

from __future__ import annotations

import torch
from torch import nn

from lowerdeck_zoo.program import Holding, Of, Program, drawn, normal


def _nested_inputs(x: dict[str, torch.Tensor], y: list[torch.Tensor]) -> torch.Tensor:
    return x["a"] + x["b"] * y[0] - y[1]


def _nested_outputs(x: torch.Tensor):
    return {"twice": x * 2, "pair": (x + 1, [x - 1, x / 2])}


def _odd_outputs(x: torch.Tensor):
    return x.sin(), None, 7, 2.5, True, "text", x


def _top(x: torch.Tensor):
    return torch.topk(x, 2), torch.sort(x, descending=True), torch.max(x, 1)


class Constants(
    Holding, weight=lambda: nn.Parameter(torch.randn(3)), table=lambda: torch.arange(3.0)
):
    """Returns a weight and a buffer as they are, one value twice, and an input untouched."""

    def forward(self, x: torch.Tensor):
        y = x + 1
        return self.weight, self.table, y, y, x


class Shared(Holding, layer=lambda: nn.Linear(4, 4)):
    """One layer called three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.layer(x)).relu())


def _no_inputs() -> torch.Tensor:
    return torch.arange(6).reshape(2, 3) * 2.5


def _nothing_to_do(x: torch.Tensor) -> torch.Tensor:
    return x


def _added_to(x: torch.Tensor) -> torch.Tensor:
    old = x * 2
    x.add_(1)
    return old + x


def _rows_of_inputs(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1].copy_(y)
    y.mul_(2)
    return x.sum(0)


def _views_of_an_input(x: torch.Tensor):
    y = x.view(-1)
    x[0].mul_(3)
    return y * 2, x.view(2, 8) - 1, y.view(2, 8).view(8, 2) + 1


PROGRAMS = (
    Program(
        "nested_inputs",
        lambda: Of(_nested_inputs),
        drawn(
            lambda: ({"a": torch.randn(3), "b": torch.randn(3)}, [torch.randn(3), torch.randn(3)])
        ),
    ),
    Program("nested_outputs", lambda: Of(_nested_outputs), normal(3)),
    Program("none_and_constant_outputs", lambda: Of(_odd_outputs), normal(3)),
    Program("named_tuples", lambda: Of(_top), normal(3, 5)),
    Program("constants_and_inputs_returned", Constants, normal(3)),
    Program("shared_layer", Shared, normal(2, 4), tags="shared-weights"),
    Program("no_inputs", lambda: Of(_no_inputs), drawn(tuple)),
    Program("nothing_to_do", lambda: Of(_nothing_to_do), normal(2)),
    Program("views_of_an_input", lambda: Of(_views_of_an_input), normal(4, 4), tags="in-place"),
    Program("input_added_to", lambda: Of(_added_to), normal(3), tags="in-place"),
    Program(
        "inputs_written_by_rows",
        lambda: Of(_rows_of_inputs),
        drawn(lambda: (torch.randn(3, 4), torch.randn(4))),
        tags="in-place",
    ),
)
