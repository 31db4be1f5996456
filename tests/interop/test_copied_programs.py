"""Programs that were copied, or saved and loaded, before anything was done with them.

A copy is not what was copied: fx names its nodes anew, weights move, and users of values are
told again. Every way through our packages must give eager's numbers all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from torch.export import ExportedProgram

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import lower, to_backend
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, official, programs, saved_and_loaded

COPIES: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "as it is": lambda program: program,
    "copied": copy.deepcopy,
    "copied twice": lambda program: copy.deepcopy(copy.deepcopy(program)),
    "copied when decomposed": lambda program: copy.deepcopy(decompose(copy.deepcopy(program))),
    "loaded and copied": lambda program: copy.deepcopy(saved_and_loaded(program)),
}


WAYS: dict[str, Callable[[ExportedProgram], bytes]] = {
    "emit": lambda program: emit(program).to_bytes(),
    "decompose, emit": lambda program: emit(decompose(program)).to_bytes(),
    "to_backend, emit": lambda program: emit(to_backend(program, XnnpackPartitioner())).to_bytes(),
    "lower": lambda program: lower(program, XnnpackPartitioner()).to_bytes(),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("program", programs("names"), ids=str)
def test_copies_give_eagers_numbers_on_every_way(program: Program, copied: str) -> None:
    exported = program.export_anew()
    calls = [official.Call(call.flat) for call in program.calls()]
    for way, bytes_of in WAYS.items():
        given = COPIES[copied](exported)
        before = [node.name for node in given.graph.nodes]
        outcome = official.run(bytes_of(given), calls)
        assert [node.name for node in given.graph.nodes] == before, way
        assert isinstance(outcome, official.Ran), f"{way}: {outcome}"
        for found, result in zip(outcome.outputs, program.results(), strict=True):
            program.compare(found, result.outputs)
    given = COPIES[copied](exported)
    before = [node.name for node in given.graph.nodes]
    again = unflatten(given)
    assert [node.name for node in given.graph.nodes] == before
    for call, result in zip(program.calls(), program.results(), strict=True):
        program.compare(again(*call.args), result.outputs)
