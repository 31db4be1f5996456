"""What a partitioner takes, its backend compiles: every operator with sizes that vary.

Sizes are bounded symbols of the export, or numbers that the program reads from data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openvino_cases import CASES
from torch import nn
from torch.export import Dim, ExportedProgram
from xnnpack_cases import cases

from lowerdeck.lowered_module import Partitioner, to_backend
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Of


class Narrowed(nn.Module):
    """Calls a model with the first elements of some dimensions; their number is an input."""

    def __init__(self, model: nn.Module, dimensions: list[tuple[int, int]]) -> None:
        super().__init__()
        self.model, self.dimensions = model, dimensions

    def forward(self, count: torch.Tensor, *inputs: torch.Tensor) -> Any:
        narrowed = list(inputs)
        size: Any = count.item()
        torch._check(size >= 2)
        for position, axis in self.dimensions:
            torch._check(size <= inputs[position].shape[axis])
            narrowed[position] = inputs[position].narrow(axis, 0, size)
        return self.model(*narrowed)


def _models() -> Iterator[Any]:
    """Yield every model of the backends' own tests; all but each tenth are for the night."""
    every = [
        *(
            (f"xnnpack-{one}", one.model, one.inputs, XnnpackPartitioner)
            for case in cases()
            for one in case.apart()
        ),
        *((f"openvino-{one}", Of(one.function), one.inputs, OpenvinoPartitioner) for one in CASES),
    ]
    tensors = [one for one in every if all(isinstance(each, torch.Tensor) for each in one[2])]
    for number, (name, *values) in enumerate(tensors):
        marks = pytest.mark.heavy if number % 10 else ()
        yield pytest.param(*values, id=f"{name}-{number}", marks=marks)


def _programs(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[ExportedProgram]:
    """Yield the program with all sizes bounded, and with each dimension read from data."""
    model.eval()
    sizes = tuple(
        {axis: Dim.AUTO(min=2, max=4 * size) for axis, size in enumerate(one.shape) if size > 1}
        for one in inputs
    )
    for shapes in ((sizes,), sizes):
        try:
            yield torch.export.export(model, inputs, dynamic_shapes=shapes)
            break
        except Exception:  # its forward takes the inputs otherwise, or fixes a size
            continue
    for axis in range(max((one.dim() for one in inputs), default=0)):
        wide = [one.shape[axis] for one in inputs if one.dim() > axis and one.shape[axis] > 1]
        same = [
            (position, axis)
            for position, one in enumerate(inputs)
            if one.dim() > axis and one.shape[axis] == min(wide, default=0)
        ]
        try:
            narrowed = Narrowed(model, same)
            yield torch.export.export(narrowed, (torch.tensor(min(wide)), *inputs))
        except Exception:  # torch cannot export it with such a size
            continue


@pytest.mark.parametrize(("model", "inputs", "partitioner"), list(_models()))
def test_what_a_partitioner_takes_is_compiled(
    model: nn.Module, inputs: tuple[Any, ...], partitioner: type[Partitioner]
) -> None:
    for program in _programs(model, inputs):
        to_backend(program, partitioner())
