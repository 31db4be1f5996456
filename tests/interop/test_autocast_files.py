"""Regions of autocast run in the official runtime as in eager, whichever calls stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.decompose import can_keep, decompose
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.torch_base import graphs_of
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, official, programs
from lowerdeck_zoo.models.modes import Layers


def _every(program: ExportedProgram, which: Callable[[Node], bool] | None) -> dict[str, Any]:
    called = [
        node.target for graph in graphs_of(program.graph_module) for node in graph.graph.nodes
    ]
    some = which is not None
    return {"keep": {each: which for each in called if can_keep(each, some=some)}}


def _every_other(program: ExportedProgram) -> dict[str, Any]:
    calls = [node for graph in graphs_of(program.graph_module) for node in graph.graph.nodes]
    return _every(program, lambda node: node in calls[::2])


# Without anything kept, the zoo's own table runs them.
WAYS: dict[str, Callable[[ExportedProgram], dict[str, Any]]] = {
    "all composites stay": lambda program: {"table": {}},
    "all stays": lambda program: _every(program, None),
    "each call stays": lambda program: _every(program, lambda node: True),
    "every other call stays": _every_other,
}


@pytest.mark.parametrize("program", programs("modes"), ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_regions_run_as_in_eager(way: str, program: Program) -> None:
    exported = program.export()
    calls = [official.Call(call.flat) for call in program.calls()]
    emitted = emit(decompose(exported, **WAYS[way](exported)))
    outcome = official.run(emitted.to_bytes(), calls)
    assert isinstance(outcome, official.Ran), outcome
    for found, result in zip(outcome.outputs, program.results(), strict=True):
        program.compare(found, result.outputs)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("delegated", [False, True])
def test_marked_calls_in_regions(on: bool, delegated: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Layers(on=on).eval(), (torch.randn(3, 8),)
    names = tuple(name for name, _ in model.named_modules() if name)
    program = torch.export.export(model, inputs, preserve_module_call_signature=names)
    if delegated:
        program = to_backend(program, XnnpackPartitioner())
        assert len(get_lowered_backend_modules(program.graph_module)) == 1
    outcome = official.run(emit(program).to_bytes(), [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    bound = 3e-2 if on else 1e-5
    torch.testing.assert_close(outcome.outputs[0][0], model(*inputs), rtol=bound, atol=bound)
