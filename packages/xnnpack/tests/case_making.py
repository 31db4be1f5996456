"""One small model with inputs, and short ways to make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


class Function(nn.Module):
    """Calls a function, beside modules that it may use."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.parts)


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: What it shows.
        model: The model in evaluation mode.
        inputs: Its inputs.
        dynamic: Dynamic shapes for the export, or None.
        others: More inputs to run, of other sizes.
        tolerance: Largest allowed difference, absolute and relative.
    """

    name: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    dynamic: Any = None
    others: tuple[tuple[Tensor, ...], ...] = field(default=())
    tolerance: float = 2e-5


def case(
    name: str, function: Callable[..., Any], *shapes: tuple[int, ...], parts: Any = (), **more: Any
) -> Case:
    inputs = tuple(torch.randn(shape) for shape in shapes)
    return Case(name, Function(function, *parts).eval(), inputs, **more)


def module(name: str, part: nn.Module, *shapes: tuple[int, ...], **more: Any) -> Case:
    def call(*arguments: Any) -> Any:
        *inputs, layer = arguments
        return layer(*inputs)

    return case(name, call, *shapes, parts=(part,), **more)
