"""Regions of autocast run in the official runtime as in eager, whichever calls stay whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.decompose import can_keep, decompose
from lowerdeck.emitter import emit
from lowerdeck.torch_base import graphs_of
from lowerdeck_zoo import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


class Regions(nn.Module):
    """Regions in regions, operators that autocast does not name, state, control flow."""

    mean: torch.Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv1d(4, 4, 3, padding=1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        with torch.autocast("cpu", dtype=self.dtype):
            h = self.narrow(nn.functional.gelu(self.wide(y)))
            attended = nn.functional.scaled_dot_product_attention(h, h, h)
            with torch.autocast("cpu", enabled=False):
                z = self.wide(y).softmax(-1)
            scores = torch.einsum("bij,bkj->bik", h, h).softmax(-1)
            near = nn.functional.cosine_similarity(h, attended)
            convolved = nn.functional.silu(self.conv(h))
        self.mean.add_(h.float().mean((0, 1)))
        either = torch.cond(h.float().sum() > 0, torch.sin, torch.cos, (convolved,))
        return x + h.float(), scores, near, either, self.narrow(z) + attended.float()


def _every(program: ExportedProgram, which: Callable[[Node], bool] | None) -> dict[str, Any]:
    called = [
        node.target for graph in graphs_of(program.graph_module) for node in graph.graph.nodes
    ]
    some = which is not None
    return {"keep": {each: which for each in called if can_keep(each, some=some)}}


def _every_other(program: ExportedProgram) -> dict[str, Any]:
    calls = [node for graph in graphs_of(program.graph_module) for node in graph.graph.nodes]
    return _every(program, lambda node: node in calls[::2])


WAYS: dict[str, Callable[[ExportedProgram], dict[str, Any]]] = {
    "core": lambda program: {},
    "all composites stay": lambda program: {"table": {}},
    "all stays": lambda program: _every(program, None),
    "each call stays": lambda program: _every(program, lambda node: True),
    "every other call stays": _every_other,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_regions_run_as_in_eager(way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Regions(dtype).eval(), torch.randn(2, 4, 8)
    program = torch.export.export(model, (x,))
    made = decompose(program, **WAYS[way](program))
    outcome = official.run(bytes(emit(made).to_bytes()), [official.Call((x,))])
    assert isinstance(outcome, official.Ran), outcome
    expected = copy.deepcopy(model)(x)
    for found, value in zip(outcome.outputs[0], expected, strict=True):
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        torch.testing.assert_close(found, value, rtol=3e-2, atol=3e-2)
