"""Every zoo program, without a backend and with each, in the official runtime equals eager.

Each file is loaded from bytes and from a path (where the runtime maps it and frees weights that it
copied) and called at least three times, with other sizes where they vary; state must persist.
With a backend the one is the file of ``to_backend`` and ``emit``, which take the program as it is,
and the other that of ``lower``, which decomposes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lowerdeck.emitter import EmittedProgram, emit
from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    get_lowered_backend_modules,
    lower,
    to_backend,
)
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, official, programs

BACKENDS = {"XNNPACK": XnnpackPartitioner, "OpenVINO": OpenvinoPartitioner}
PARAMETERS = [
    *programs(without="large"),
    *(pytest.param(program, marks=pytest.mark.heavy) for program in programs("transformers")),
]


def _check(program: Program, source: bytes | Path) -> None:
    """Compare all calls of a file with eager."""
    calls = [official.Call(call.flat, call.method) for call in program.calls()]
    # Methods share their state in the Program API only.
    outcome = official.run(source, calls, shared_arenas=len(program.methods) > 1)
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
