"""Taking programs apart beside torch's ``run_decompositions``: ratios, growth, traces."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.export import ExportedProgram, export

from benchmarks.emitter_models import MODELS
from benchmarks.harness import Row, cpu_seconds, growth_exponent, paired
from lowerdeck.decompose import decompose, explain

PACKAGE = "decompose"
PEER = "ExportedProgram.run_decompositions"


def rows(quick: bool) -> Iterator[Row]:
    """Yield the rows of this package.

    Args:
        quick: Sizes that take seconds instead of minutes.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from _models(quick)
        yield from _growth(quick)


class Blocks(nn.Module):
    """``count`` blocks of a linear layer, an activation and a norm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _program(model: nn.Module, *args: torch.Tensor) -> ExportedProgram:
    with torch.no_grad():
        return export(model.eval(), args)


def _models(quick: bool) -> Iterator[Row]:
    for name, (build, inputs) in list(MODELS.items())[: 2 if quick else None]:
        program = _program(build(), *inputs())
        mine, theirs = paired(
            partial(decompose, program), program.run_decompositions, repeat=1 if quick else 3
        )
        told = explain(program)
        yield Row(
            PACKAGE,
            f"{name}: {told}",
            mine,
            theirs,
            "s",
            ">= 5x",
            theirs >= 5 * mine,
            f"peer: {PEER}",
        )


def _growth(quick: bool) -> Iterator[Row]:
    sizes = (64, 128, 256) if quick else (256, 512, 1024, 2048, 4096)
    series: list[tuple[float, float, float | None]] = []
    for count in sizes:
        program = _program(Blocks(count), torch.randn(2, 16))
        mine = cpu_seconds(partial(decompose, program), repeat=3)
        theirs = None
        if count <= 256:
            theirs = cpu_seconds(program.run_decompositions, repeat=1)
        series.append((len(program.graph.nodes), mine, theirs))
    exponent = growth_exponent((nodes, mine) for nodes, mine, _ in series)
    yield Row(
        PACKAGE,
        "growth of CPU time with nodes",
        exponent,
        unit="exponent",
        goal="<= 1.05",
        met=exponent <= 1.05,
        series=tuple(series),
        axes=("nodes", "CPU time (s)"),
    )
