"""Norms of transposed tensors have the strides of the kernel, where fake tensors have others."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn

from lowerdeck.decompose import Rules, decompose, take_apart


class _Normed(nn.Module):
    """A norm over channels that are last, as speech models have it, then what views it."""

    def __init__(self, then: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.linear = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.then = nn.Identity() if then is None else then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The first shows no order of dimensions, and is a kin of the second by all but sizes.
        y = self.first(x.flatten(0, 1)).view_as(x)
        made: torch.Tensor = self.linear(self.then(self.norm(y.transpose(1, 2))).transpose(1, 2))
        return made


def _run(program: torch.export.ExportedProgram, *inputs: torch.Tensor) -> Any:
    return program.module(check_guards=False)(*inputs)


@pytest.mark.parametrize(
    "then", [nn.Identity(), nn.ReLU(), nn.BatchNorm1d(8)], ids=lambda then: type(then).__name__
)
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("sizes", [(2, 5, 8), (1, 5, 8), (3, 1, 8)])
def test_a_norm_of_transposed_rows_can_be_run(
    sizes: tuple[int, ...], is_training: bool, then: Any
) -> None:
    torch.manual_seed(0)
    model = _Normed(then).train(is_training)
    x = torch.randn(sizes)
    program = torch.export.export(model, (x,))
    found = _run(decompose(program), x)
    torch.testing.assert_close(found, model(x))


def test_sizes_may_vary() -> None:
    model, x = _Normed().eval(), torch.randn(2, 5, 8)
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")}
    program = torch.export.export(model, (x,), dynamic_shapes=(dims,))
    made = decompose(program)
    for sizes in ((2, 5, 8), (4, 7, 8)):
        x = torch.randn(sizes)
        torch.testing.assert_close(_run(made, x), model(x))


def test_what_torch_took_apart_can_be_run_again() -> None:
    model, x = _Normed().eval(), torch.randn(2, 5, 8)
    torchs = torch.export.export(model, (x,)).run_decompositions()
    file = io.BytesIO()
    torch.export.save(torchs, file)
    file.seek(0)
    for program in (torchs, torch.export.load(file)):
        torch.testing.assert_close(_run(decompose(program), x), model(x))


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_norms_of_images_are_as_torch_gives_them(fmt: torch.memory_format) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(60, 2)).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 4, 5).to(memory_format=fmt),))
    assert not differences(decompose(program), program.run_decompositions())


def test_a_compiler_that_copies_gets_what_torch_gives() -> None:
    program = torch.export.export(_Normed().eval(), (torch.randn(2, 5, 8),))
    rules = Rules.of(None)
    own = Rules(rules.others, rules.composites)
    targets = [
        [node.target for node in graph.nodes]
        for graph in (
            take_apart(program, own).graph_module.graph,
            program.run_decompositions().graph,
        )
    ]
    assert targets[0] == targets[1]
