"""``torch.export`` (2.13) leaves readers out of ``node.users``: that changes nothing.

It does so around ``no_grad``. Here every value forgets its last reader, placeholders of weights
and state among them. Whoever went by users alone would leave a weight out, take a value for dead,
or cut it off from its reader.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.torch_base import graphs_of
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, programs
from tests.soak.raw_programs import raw_program

CHOSEN = programs(without="large")[::3]
SEEDS = [seed for seed in range(300, 312) if seed not in {303, 310, 311}]
"""torch cannot export 303 and 310, and cannot decompose 311."""


def _forget(program: ExportedProgram) -> ExportedProgram:
    for module in graphs_of(program.graph_module):
        for node in module.graph.nodes:
            if node.users:
                node.users.popitem()
    return program


def _made(program: ExportedProgram) -> list[Any]:
    lowered = to_backend(program, XnnpackPartitioner())
    return [emit(program).to_bytes(), emit(lowered).to_bytes(), unflatten(program).code]


@pytest.mark.parametrize("program", CHOSEN, ids=str)
def test_of_a_model(program: Program) -> None:
    exported = program.export_anew()
    wanted = _made(exported)
    assert _made(_forget(exported)) == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_raw_program(seed: int) -> None:
    made = raw_program(seed)
    for name, model in made.models().items():
        shapes = made.dynamic_shapes()
        program = torch.export.export(model, made.example(name), dynamic_shapes=shapes)
        wanted = _made(program)
        assert _made(_forget(program)) == wanted
