"""Every zoo program, without a backend and with each, in the official runtime equals eager.

Each file is loaded from bytes and from a path (where the runtime maps it and frees weights that it
copied) and called at least three times, with other sizes where they vary; state must persist.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Program, official, programs

pytestmark = pytest.mark.filterwarnings("ignore")
BACKENDS = {"XNNPACK": XnnpackPartitioner, "OpenVINO": OpenvinoPartitioner}
PARAMETERS = [
    *programs(without="large"),
    *(pytest.param(program, marks=pytest.mark.heavy) for program in programs("transformers")),
]


def _check(
    program: Program, exported: Mapping[str, ExportedProgram], folder: Path, where: str
) -> None:
    """Compare all calls of a file from bytes and from a path with eager."""
    emitted = emit(dict(exported))
    emitted.save(folder / "model.pte")
    calls = [official.Call(call.flat, call.method) for call in program.calls()]
    # Methods share their state in the Program API only.
    shared = len(program.methods) > 1
    for source in (emitted.to_bytes(), folder / "model.pte"):
        outcome = official.run(source, calls, shared_arenas=shared)
        assert isinstance(outcome, official.Ran), outcome
        for number, result in enumerate(program.results()):
            found = outcome.outputs[number], outcome.inputs[number]
            try:
                program.compare(found, tuple(result))
            except AssertionError as error:
                raise AssertionError(f"{where}, {type(source).__name__}, call {number}") from error


@pytest.mark.skipif(not official.available(), reason=official.REASON)
@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_official_runtime_equals_eager(program: Program, tmp_path: Path) -> None:
    _check(program, program.exports(), tmp_path, "no backend")


@pytest.mark.skipif(not official.available(), reason=official.REASON)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_official_runtime_equals_eager_with_a_backend(
    program: Program, backend: str, tmp_path: Path
) -> None:
    exported = program.exports()
    # Together, so that no method takes for a constant what another one mutates.
    partitioners = {name: BACKENDS[backend]() for name in exported}
    lowered = to_backend(MethodProgramsPartitionerSpec(exported, partitioners))
    # Nothing delegated: the file is that of the test without a backend.
    if any(get_lowered_backend_modules(one.graph_module) for one in lowered.values()):
        _check(program, lowered, tmp_path, backend)


@pytest.mark.parametrize("program", PARAMETERS, ids=str)
def test_runner_equals_eager_and_the_memory_plan_holds(program: Program) -> None:
    loaded = load(emit(program.exports()).to_bytes(), memory="poison")
    for number, (call, result) in enumerate(zip(program.calls(), program.results(), strict=True)):
        found = loaded.run(call.method, *call.args), call.flat
        try:
            program.compare(found, tuple(result))
        except AssertionError as error:
            raise AssertionError(f"call {number}") from error
