"""Sample programs for tests of backends and partitioners."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.export import Dim, ExportedProgram

from lowerdeck.decompose import decompose
from lowerdeck.lowered_module.pipeline import separate_inputs

Values: TypeAlias = list[torch.Tensor]
Step: TypeAlias = "Callable[[GeneratedModel, Values, tuple[int, int]], torch.Tensor]"


@dataclass(frozen=True, slots=True)
class Sample:
    """A program with example inputs.

    Attributes:
        name: Its name in reports.
        module: The eager module; calling it changes its state.
        dynamic_shapes: The ``dynamic_shapes`` of ``torch.export.export``.
    """

    name: str
    module: torch.nn.Module
    inputs: tuple[Any, ...]
    dynamic_shapes: Any = None

    def export(self) -> ExportedProgram:
        """Return the sample as a functional core ATen program."""
        with torch.no_grad():
            inputs, _ = separate_inputs(self.module, self.inputs, {})
            exported = torch.export.export(
                self.module, inputs, dynamic_shapes=self.dynamic_shapes, strict=False
            )
            return decompose(exported)


class GeneratedModel(torch.nn.Module):
    """A random model on tensors of shape (batch, 4), determined by its seed.

    Args:
        size: Number of operations.
        state: Whether it may mutate buffers.
        control_flow: Whether it may have branches.
    """

    def __init__(
        self, seed: int, size: int = 12, *, state: bool = True, control_flow: bool = True
    ) -> None:
        super().__init__()
        rng = random.Random(seed)
        maker = torch.Generator().manual_seed(seed)
        self.weight: torch.nn.Parameter = torch.nn.Parameter(
            torch.randn(4, 4, generator=maker) / 2
        )
        self.bias: torch.nn.Parameter = torch.nn.Parameter(torch.randn(4, generator=maker) / 2)
        self.register_buffer("offset", torch.randn(4, generator=maker))
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("hidden", torch.zeros(4), persistent=False)
        self.constant: torch.Tensor = torch.full((4,), 0.5)
        steps: list[Step] = [
            lambda _, v, i: v[i[0]] + v[i[1]],
            lambda _, v, i: v[i[0]] * v[i[1]],
            lambda _, v, i: torch.relu(v[i[0]]),
            lambda _, v, i: torch.sin(v[i[0]]),
            lambda m, v, i: torch.nn.functional.linear(v[i[0]], m.weight, m.bias),
            lambda m, v, i: v[i[0]] + m.offset,  # type: ignore[operator]
            lambda m, v, i: v[i[0]] * m.constant,
            lambda _, v, i: torch.cat(torch.chunk(v[i[0]], 2, dim=1)[::-1], dim=1) + v[i[1]],
            lambda m, v, i: torch.cat([m.bias.expand_as(v[i[0]]), v[i[0]]], dim=1)[:, 2:6],
            lambda _, v, i: v[i[0]] - v[i[0]].mean(dim=0, keepdim=True),
            lambda _, v, i: v[i[0]] / v[i[0]].shape[0],
        ]
        if state:
            steps += [_count, _hide]
        if control_flow:
            steps.append(_branch)
        self.steps: list[tuple[Step, tuple[int, int]]] = [
            (rng.choice(steps), _pair(rng, 2 + n)) for n in range(size)
        ]
        self.chosen: list[int] = sorted(rng.sample(range(2, 2 + size), min(3, size)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        """Return some computed values, a None and an int."""
        values = [x, y]
        for step, operands in self.steps:
            values.append(torch.tanh(step(self, values, operands)))
        values_by_name: dict[str, Any] = {f"v{i}": values[i] for i in self.chosen}
        return {"last": [values[-1], None], **values_by_name, "size": 4}


class TwoPartitions(torch.nn.Module):
    """Model of two partitions with different weights, for backends without ``topk``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.eye(4), torch.full((4, 4), 0.25)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape (4, 4)."""
        x = torch.nn.functional.linear(x * self.weights[0], self.weights[0]).topk(4).values
        return torch.nn.functional.linear(x * self.weights[1], self.weights[1])


def generated(seed: int, size: int = 12, *, dynamic: bool = False, **options: bool) -> Sample:
    """Return a sample with a random model.

    Args:
        seed: Determines the model and its inputs.
        size: Number of operations of the model.
        dynamic: Whether the batch size is dynamic.
        **options: ``state`` and ``control_flow`` of ``GeneratedModel``.
    """
    maker = torch.Generator().manual_seed(seed + 1)
    inputs = tuple(torch.randn(3, 4, generator=maker) for _ in range(2))
    batch = Dim("batch", min=2, max=16)
    return Sample(
        f"generated {seed}",
        GeneratedModel(seed, size, **options).eval(),
        inputs,
        {"x": {0: batch}, "y": {0: batch}} if dynamic else None,
    )


def _pair(rng: random.Random, below: int) -> tuple[int, int]:
    # Prefer recent values, which makes models deep.
    return (
        rng.randrange(max(0, below - 3), below),
        rng.randrange(max(0, below - 6), below),
    )


def _count(model: GeneratedModel, values: Values, which: tuple[int, int]) -> torch.Tensor:
    model.count.add_(values[which[0]].detach().sum(dim=0) / 8)  # type: ignore[operator]
    return values[which[1]] + model.count  # type: ignore[operator]


def _hide(model: GeneratedModel, values: Values, which: tuple[int, int]) -> torch.Tensor:
    before = values[which[0]] * model.hidden  # type: ignore[operator]
    model.hidden.copy_(values[which[1]].detach()[0])  # type: ignore[operator]
    return before


def _branch(model: GeneratedModel, values: Values, which: tuple[int, int]) -> torch.Tensor:
    def above(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a + b) * model.weight.sum()

    def below(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sin(a - b)

    first, second = values[which[0]], values[which[1]]
    result: torch.Tensor = torch.cond(first.sum() > 0, above, below, (first, second))
    return result
