"""Decomposing programs against torch's ``run_decompositions``: ratios and growth."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from benchmarks import export_to_bytes
from benchmarks.emitter_models import MODELS
from benchmarks.export_models import Blocks
from benchmarks.harness import Row, cpu_seconds, growth_exponent, paired
from lowerdeck.decompose import DecompositionCache, decompose, explain
from lowerdeck_zoo.models.language import Llama

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
        yield from _dynamic(quick)
        yield from _families(quick)
        yield from _growth(quick)
    yield from export_to_bytes.rows(quick)


def _program(model: nn.Module, *args: torch.Tensor) -> ExportedProgram:
    with torch.no_grad():
        return export(model.eval(), args)


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 1000, (1, 16)),)


_OWN = {
    "llama-like, 16 layers": (lambda: Llama(64, 16, 1000), _tokens),
    "1,024 blocks of linear, gelu, layer norm": (
        lambda: Blocks(1024),
        lambda: (torch.randn(2, 16),),
    ),
    "transformer encoder, 12 layers": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 12),
        lambda: (torch.randn(16, 2, 64),),
    ),
    "encoder and decoder, 6 layers each": (
        lambda: nn.Transformer(64, 4, 6, 6, 128),
        lambda: (torch.randn(16, 2, 64), torch.randn(8, 2, 64)),
    ),
    "convolutions, 100 layers": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8),
                                              nn.SiLU()) for _ in range(100))),
        lambda: (torch.randn(1, 8, 16, 16),),
    ),
}  # fmt: skip
"""Beside the models of the emitter's benchmarks."""


def _models(quick: bool) -> Iterator[Row]:
    every = {**MODELS, **_OWN}
    chosen = list(every)[1::5] if quick else list(every)
    for name in chosen:
        build, inputs = every[name]
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


def _dynamic(quick: bool) -> Iterator[Row]:
    """Yield what a model costs whose batch and number of tokens vary."""
    layers = 2 if quick else 8
    shapes = ({0: Dim("batch"), 1: Dim("tokens", max=512)},)
    with torch.no_grad():
        inputs = (torch.zeros(2, 16).long(),)
        program = export(Llama(64, layers, 1000), inputs, dynamic_shapes=shapes)
    mine, theirs = paired(partial(decompose, program), program.run_decompositions)
    yield Row(
        PACKAGE,
        f"llama-like, {layers} layers, dynamic batch and tokens: {explain(program)}",
        mine,
        theirs,
        "s",
        ">= 5x",
        theirs >= 5 * mine,
        f"peer: {PEER}",
    )


def _families(quick: bool) -> Iterator[Row]:
    """Yield the second model of a family against the first, with one cache for both."""
    for layers in (2,) if quick else (2, 8):
        first, second = (_program(Llama(64, layers, 1000), *_tokens()) for _ in range(2))
        costs: list[tuple[float, float]] = []
        for _ in range(1 if quick else 7):
            cache = DecompositionCache()
            costs.append(
                (
                    cpu_seconds(partial(decompose, first, cache=cache), repeat=1),
                    cpu_seconds(partial(decompose, second, cache=cache), repeat=1),
                )
            )
        whole, rest = (min(times) for times in zip(*costs, strict=True))
        yield Row(
            PACKAGE,
            f"llama-like, {layers} layers: the second of a family beside the first, one cache",
            rest,
            whole,
            "s",
            "<= 0.4 of the first",
            rest <= 0.4 * whole,
            "peer: the first",
        )


def _growth(quick: bool) -> Iterator[Row]:
    sizes = (64, 128, 256) if quick else (390, 780, 1560, 3120, 6250)
    costs: list[tuple[float, float]] = []
    for count in sizes:
        program = _program(Blocks(count), torch.randn(2, 16))
        mine = cpu_seconds(partial(decompose, program), repeat=3)
        costs.append((len(program.graph.nodes), mine))
    exponent = growth_exponent(costs)
    yield Row(
        PACKAGE,
        "growth of CPU time with nodes",
        exponent,
        unit="exponent",
        goal="<= 1.05",
        met=exponent <= 1.05,
    )
