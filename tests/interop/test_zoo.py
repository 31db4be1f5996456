"""Every zoo program, without a backend and with each, in the official runtime equals eager.

Each file is loaded from bytes and from a path (where the runtime maps it and frees weights that it
copied) and called at least three times, with other sizes where they vary; state must persist.
With a backend the one is the file of ``to_backend`` and ``emit``, which take the program as it is,
and the other that of ``lower``, which decomposes it. Programs may have been copied, or saved and
loaded, which renames their nodes, or have calls that were kept from decomposition.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.decompose import can_keep, decompose
from lowerdeck.emitter import EmitConfig, EmittedProgram, Place, PlanRequest, emit
from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    get_lowered_backend_modules,
    lower,
    to_backend,
)
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck.runner import load
from lowerdeck.torch_base import graphs_of
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, official, programs, saved_and_loaded
from lowerdeck_zoo import program as named

BACKENDS = {"XNNPACK": XnnpackPartitioner, "OpenVINO": OpenvinoPartitioner}
PARAMETERS = [
    *programs(without="large"),
    *(pytest.param(program, marks=pytest.mark.heavy) for program in programs("transformers")),
]


def _check(program: Program, source: bytes | Path, data: Path | None = None) -> None:
    """Compare all calls of a file with eager."""
    calls = [official.Call(call.flat, call.method) for call in program.calls()]
    # Methods share their state in the Program API only.
    shared = len(program.methods) > 1 and data is None
    outcome = official.run(source, calls, data=data, shared_arenas=shared)
    assert isinstance(outcome, official.Ran), outcome
    for number, result in enumerate(program.results()):
        found = outcome.outputs[number], outcome.inputs[number]
        try:
            program.compare(found, tuple(result))
        except AssertionError as error:
            raise AssertionError(f"call {number}") from error


def _saved(emitted: EmittedProgram, folder: Path) -> Path:
    emitted.save(folder / "model.pte")
    return folder / "model.pte"


@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_official_runtime_equals_eager(program: Program, tmp_path: Path) -> None:
    emitted = emit(program.exports())
    _check(program, emitted.to_bytes())
    _check(program, _saved(emitted, tmp_path))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_official_runtime_equals_eager_with_a_backend(program: Program, backend: str) -> None:
    exported = program.exports()
    # Together, so that no method takes for a constant what another one mutates.
    partitioners = {name: BACKENDS[backend]() for name in exported}
    lowered = to_backend(MethodProgramsPartitionerSpec(exported, partitioners))
    # Nothing delegated: the file is that of the test without a backend.
    if any(get_lowered_backend_modules(one.graph_module) for one in lowered.values()):
        _check(program, emit(lowered).to_bytes())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_official_runtime_equals_eager_once_lowered(
    program: Program, backend: str, tmp_path: Path
) -> None:
    partitioners = {name: BACKENDS[backend]() for name in program.exports()}
    _check(program, _saved(lower(program.exports(), partitioners), tmp_path))


@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_runner_equals_eager_and_the_memory_plan_holds(program: Program) -> None:
    loaded = load(emit(program.exports()).to_bytes(), memory="poison")
    for number, (call, result) in enumerate(zip(program.calls(), program.results(), strict=True)):
        found = loaded.run(call.method, *call.args), call.flat
        try:
            program.compare(found, tuple(result))
        except AssertionError as error:
            raise AssertionError(f"call {number}") from error


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
    for way, bytes_of in WAYS.items():
        given = COPIES[copied](exported)
        before = [node.name for node in given.graph.nodes]
        _check(program, bytes_of(given))
        assert [node.name for node in given.graph.nodes] == before, way
    again = unflatten(given)
    assert [node.name for node in given.graph.nodes] == before
    for call, result in zip(program.calls(), program.results(), strict=True):
        program.compare(again(*call.args), result.outputs)


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
KEPT: dict[str, Callable[[ExportedProgram], dict[str, Any]]] = {
    "all composites stay": lambda program: {"table": {}},
    "all stays": lambda program: _every(program, None),
    "each call stays": lambda program: _every(program, lambda node: True),
    "every other call stays": _every_other,
}


@pytest.mark.parametrize("program", programs("modes"), ids=str)
@pytest.mark.parametrize("kept", KEPT)
def test_regions_run_as_in_eager_whichever_calls_stay(kept: str, program: Program) -> None:
    exported = program.export()
    _check(program, emit(decompose(exported, **KEPT[kept](exported))).to_bytes())


def small_ones_apart(request: PlanRequest) -> list[Place]:
    """Place tensors of at most 64 bytes in memory 1, others in memory 2, none over another."""
    places, ends = [], {1: 0, 2: 0}
    for life in request.lives:
        memory = 1 if life.nbytes <= 64 else 2
        places.append(Place(memory, ends[memory]))
        ends[memory] += life.nbytes
    return places


SETTINGS = {
    "small tensors in another memory": EmitConfig(memory_planner=small_ones_apart),
    "inputs of the caller": EmitConfig(plan_inputs=False),
    "outputs of the caller": EmitConfig(plan_outputs=False),
    "weights in a file": EmitConfig(weights_file="weights"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "model", ["push_peek_from_zero", "kv_cache", "channels_last_inside", "views_of_an_input"]
)
def test_settings_of_memory_do_not_change_numbers(model: str, name: str, tmp_path: Path) -> None:
    emit(named(model).exports(), config=SETTINGS[name]).save(tmp_path / "model.pte")
    _check(named(model), tmp_path / "model.pte", next(iter(tmp_path.glob("*.ptd")), None))
