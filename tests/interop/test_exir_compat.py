"""Files made under exir's names, in the official runtime."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lowerdeck.exir_compat import (
    ExecutorchBackendConfig,
    MemoryPlanningPass,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.xnnpack import XnnpackPartitioner
from tests.interop import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]
ATEN = torch.ops.aten


class Counting(nn.Module):
    """A layer, and state that is read and changed."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.activation: Any = nn.functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.linear(x))
        self.total.add_(y.sum(0))
        return y + self.total


class Cache(nn.Module):
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))


class Fill(Cache):
    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(x)
        return x + 0


class Read(Cache):
    def forward(self) -> Tensor:
        return self.cache + 0


def to_relu(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.target is ATEN.gelu.default:
            node.target = ATEN.relu.default


def ran(path: Path, *calls: official.Call) -> list[Any]:
    outcome = official.run(path, calls)
    assert isinstance(outcome, official.Ran), outcome
    return list(outcome.outputs)


@pytest.mark.parametrize("way", ["plain", "transformed", "lowered"])
def test_a_model_with_state_gives_eagers_numbers(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Counting().eval(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    program = torch.export.export(model, (x,))
    if way == "lowered":
        manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    else:
        manager = to_edge(program, {"limit": 7})
    if way == "transformed":
        manager = manager.transform([to_relu])
        eager.activation = torch.relu
    path = tmp_path / "model.pte"
    manager.to_executorch().save(str(path))
    with torch.no_grad():
        for (found,), wanted in zip(
            ran(path, official.Call((x,)), official.Call((x,))), (eager(x), eager(x)), strict=True
        ):
            torch.testing.assert_close(found, wanted)


def test_state_of_one_name_is_shared_where_asked(tmp_path: Path) -> None:
    programs = {
        "fill": torch.export.export(Fill(), (torch.ones(2),)),
        "read": torch.export.export(Read(), ()),
    }
    config = ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True)
    )
    path = tmp_path / "model.pte"
    to_edge(programs).to_executorch(config).save(str(path))
    calls = [official.Call((torch.ones(2),), "fill"), official.Call((), "read")]
    outcome = official.run(path, calls, shared_arenas=True)
    assert isinstance(outcome, official.Ran), outcome
    assert outcome.outputs[1][0].sum() == 2
