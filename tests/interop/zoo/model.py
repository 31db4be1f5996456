"""What a model of the zoo is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Model:
    """One model of the zoo.

    Attributes:
        name: What a failing test is called.
        build: Makes the module; weights depend only on the seed that the test sets.
        calls: Makes the inputs of each call, in order; the first are the example inputs.
        dynamic_shapes: As torch.export takes them.
        atol: Largest absolute difference from eager that is no fault.
        heavy: Whether it takes too long for every commit.
    """

    name: str
    build: Callable[[], nn.Module]
    calls: Callable[[], list[tuple[Any, ...]]]
    dynamic_shapes: Any = None
    atol: float = 1e-4
    heavy: bool = False

    def export(self) -> tuple[nn.Module, torch.export.ExportedProgram, list[tuple[Any, ...]]]:
        """Return the eager module, its exported program and the calls, all from one seed."""
        torch.manual_seed(0)
        module = self.build().eval()
        calls = self.calls()
        program = torch.export.export(module, calls[0], dynamic_shapes=self.dynamic_shapes)
        return module, program, calls


class Of(nn.Module):
    """A module that is one function, for models without weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def normal(*sizes: int, repeat: int = 2) -> Callable[[], list[tuple[Any, ...]]]:
    """Return a maker of ``repeat`` calls, each with one standard normal input of these sizes."""
    return lambda: [(torch.randn(*sizes),) for _ in range(repeat)]
