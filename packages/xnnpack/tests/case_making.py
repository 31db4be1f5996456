"""Small models with inputs, and short ways to make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Tensor = torch.Tensor


class Function(nn.Module):
    """Calls a function, beside modules that it may use."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.parts)


class Several(nn.Module):
    """Calls functions and layers with the same inputs; functions get the parts as well."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], parts: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList(f for f in functions.values() if isinstance(f, nn.Module))
        self.parts = nn.ModuleList(parts)

    def results(self, *inputs: Tensor) -> dict[str, list[Tensor]]:
        """Return the results by the names of the functions."""
        return {
            name: pytree.tree_leaves(
                one(*inputs) if isinstance(one, nn.Module) else one(*inputs, *self.parts)
            )
            for name, one in self.functions.items()
        }

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(one for each in self.results(*inputs).values() for one in each)


@dataclass(frozen=True)
class Case:
    """One model that XNNPACK computes as a whole.

    Attributes:
        model: The model in evaluation mode.
        dynamic: Dynamic shapes for the export, or None.
        others: More inputs to run, of other sizes.
        tolerance: Largest allowed difference: absolute and relative, of integers absolute only.
        floats: Number of nodes that read integers and are known to compute floats.
    """

    name: str
    model: Several
    inputs: tuple[Tensor, ...]
    dynamic: Any = None
    others: tuple[tuple[Tensor, ...], ...] = ()
    tolerance: float = 2e-5
    floats: int = 0

    def __str__(self) -> str:
        return self.name

    def apart(self) -> list[Case]:
        """Return a case for each of its functions."""
        return [
            Case(f"{self.name}_{key}", Several({key: one}, self.model.parts).eval(), self.inputs)
            for key, one in self.model.functions.items()
        ]

    def check(self, found: Iterable[Tensor], inputs: tuple[Tensor, ...], rtol: float = -1) -> None:
        """Raise AssertionError unless results are as near to eager's as the case allows.

        Args:
            inputs: What they were computed of.
            rtol: The relative tolerance, that of the case by default.
        """
        with torch.no_grad():
            wanted = self.model.results(*inputs)
        named = [(name, one) for name, leaves in wanted.items() for one in leaves]
        rtol = self.tolerance if rtol < 0 else rtol
        for result, (name, one) in zip(found, named, strict=True):
            assert result.dtype == one.dtype, name
            message = f"{self.name}, {name}: {{}}".format
            a, b = (x.int() if x.dtype == torch.int8 else x for x in (result, one))
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=self.tolerance, equal_nan=True, msg=message
            )


def case(
    name: str, functions: Any, *inputs: tuple[int, ...] | Tensor, parts: Any = (), **more: Any
) -> Case:
    """Return a case.

    Args:
        functions: A function or a layer, or several by name.
        inputs: Sizes of normal numbers, or tensors.
        parts: Layers that functions get after the inputs.
        more: Fields of the case.
    """
    if not isinstance(functions, Mapping):
        functions = {"": functions}
    given = tuple(torch.randn(one) if isinstance(one, tuple) else one for one in inputs)
    return Case(name, Several(functions, parts).eval(), given, **more)
