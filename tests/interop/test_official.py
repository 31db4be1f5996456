"""The harness around the official runtime tells outcomes apart and outlives them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from multiprocessing import Pipe

import pytest
import torch
from torch import nn

from lowerdeck.emitter import OFFICIAL_KERNELS, emit
from lowerdeck_zoo import official

needs_runtime = pytest.mark.skipif(not official.available(), reason=official.REASON)
GOOD, BAD = official.Call((torch.tensor([-1.0, 2.0]),)), official.Call((torch.ones(2),), "no_such")
WRONG_TYPE = official.Call((torch.ones(2, dtype=torch.int8),))


@pytest.fixture(scope="module")
def program() -> bytes:
    return bytes(emit(torch.export.export(nn.ReLU(), (torch.ones(2),))).to_bytes())


@pytest.fixture
def runtime() -> Iterator[official.OfficialRuntime]:
    with official.OfficialRuntime() as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("installed", "found"),
    [({"_portable_lib"}, "_portable_lib"), ({"_C"}, "_C"), (set(), None), (None, None)],
    ids=["to 1.4", "from 1.5", "neither", "no executorch"],
)
def test_the_binding_is_the_one_that_is_there(monkeypatch, installed, found):
    def find_spec(name: str) -> ModuleSpec | None:
        if installed is None:
            raise ModuleNotFoundError(name)
        return ModuleSpec(name, None) if name.rpartition(".")[2] in installed else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    expected = f"executorch.extension.pybindings.{found}" if found else None
    assert official.binding_name() == expected
    assert official.available() == (found is not None)


@needs_runtime
def test_outcomes_are_told_apart_by_a_worker_that_goes_on(program, runtime):
    outcome = runtime.run(official.Case(program, [GOOD]))
    assert isinstance(outcome, official.Ran), outcome
    assert (outcome.methods, outcome.outputs[0][0].tolist()) == (["forward"], [0, 2])
    for content in (b"no program" * 10, program[:100]):
        assert isinstance(runtime.run(official.Case(content)), official.LoadError)
    for bad, code in ((BAD, None), (WRONG_TYPE, 0x12)):
        outcome = runtime.run(official.Case(program, [GOOD, bad]))
        assert isinstance(outcome, official.MethodError), outcome
        assert outcome.call == 1
        assert code in (None, outcome.code)
    assert runtime.restarts == 0
    assert isinstance(runtime.run(official.Case(b""), timeout=0.0), official.TimedOut)
    assert isinstance(runtime.run(official.Case(program, [GOOD])), official.Ran)


def test_types_that_torch_does_not_pickle_come_back_whole():
    here, there = Pipe()
    for dtype in (torch.uint16, torch.uint64, torch.bits8, torch.float8_e5m2):
        given = torch.arange(6, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
        official._send(here, [given.view(dtype).reshape(2, 3)])
        (back,) = official._receive(there)
        assert (back.dtype, back.shape) == (dtype, (2, 3))
        assert torch.equal(back.flatten().view(torch.uint8), given)
    here.close()
    there.close()


@needs_runtime
def test_a_worker_that_dies_is_told_and_started_again(tmp_path):
    # An interpreter that ends at once stands for a runtime that aborts.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ABRT $$\n")
    python.chmod(0o755)
    with official.OfficialRuntime(python=str(python)) as runtime:
        for times in (1, 2):
            outcome = runtime.run(official.Case(b""))
            assert isinstance(outcome, official.Crash), outcome
            assert (outcome.signal, runtime.restarts) == ("SIGABRT", times)


@needs_runtime
def test_the_emitters_table_of_kernels_is_what_this_runtime_has():
    code = (
        f"import torch, {official.binding_name()} as binding\n"
        "print(*binding._get_operator_names(), sep='\\n')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) == set(OFFICIAL_KERNELS.names)
