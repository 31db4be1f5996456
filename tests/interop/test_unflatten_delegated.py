"""Delegated programs get their hierarchy back, with each delegate where its neighbours are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowerdeck.demo_backends import DelegateMappingDemoPartitioner
from lowerdeck.lowered_module import get_delegates, to_backend
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return x + self.fc(self.norm(x)).relu().erf()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return {"out": self.head(self.layers[0](x)), "middle": x}


def lowered(partitioner, *, strict):
    torch.manual_seed(0)
    eager, x = Net().eval(), torch.randn(4, 8)
    program = torch.export.export(copy.deepcopy(eager), (x,), strict=strict)
    return eager, x, to_backend(program, partitioner)


def runs(module, x, calls=3):
    with torch.no_grad():
        return [module(x) for _ in range(calls)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("partitioner", [XnnpackPartitioner, DelegateMappingDemoPartitioner])
def test_a_delegated_program_computes_what_eager_does(partitioner, strict):
    eager, x, program = lowered(partitioner(), strict=strict)
    assert get_delegates(program.graph)
    text = str(program.graph)
    module = unflatten(program)
    for found, expected in zip(runs(module, x), runs(eager, x), strict=True):
        torch.testing.assert_close(found, expected)
    assert str(program.graph) == text
    torch.testing.assert_close(runs(copy.deepcopy(module), x), runs(eager, x))
    # Weights that went into a delegate are its own now; all other state has eager's names.
    kept = set(program.state_dict)
    assert list(module.state_dict()) == [name for name in eager.state_dict() if name in kept]
    assert [name for name, _ in module.named_modules()] == [
        name for name, _ in eager.named_modules()
    ]
    assert module.layers[0].seen == 6


@pytest.mark.parametrize("strict", [False, True])
def test_a_delegate_inside_of_one_layer_stands_in_that_layer(strict):
    _, _, program = lowered(DelegateMappingDemoPartitioner(), strict=strict)
    module = unflatten(program)
    calls = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert [target.partition("..")[0] for target in calls] == [
        "layers.0",
        "layers.1",
        "layers.0",
        "head",
    ]
    assert not get_delegates(module.graph)
    assert get_delegates(module.layers[1].graph)
