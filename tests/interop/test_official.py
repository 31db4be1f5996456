"""The harness around the official runtime tells outcomes apart and outlives them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
from torch import nn

from lowerdeck.emitter import OFFICIAL_KERNELS, emit
from lowerdeck_zoo import official

needs_runtime = pytest.mark.skipif(not official.available(), reason=official.REASON)


def _program() -> bytes:
    return bytes(emit(torch.export.export(nn.ReLU(), (torch.ones(2),))).to_bytes())


@pytest.mark.parametrize(
    ("installed", "found"),
    [({"_portable_lib"}, "_portable_lib"), ({"_C"}, "_C"), (set(), None)],
    ids=["to 1.4", "from 1.5", "neither"],
)
def test_the_binding_is_the_one_that_is_there(monkeypatch, installed, found):
    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name.rpartition(".")[2] in installed else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    expected = f"executorch.extension.pybindings.{found}" if found else None
    assert official.binding_name() == expected
    assert official.available() == (found is not None)


def test_without_executorch_there_is_no_binding(monkeypatch):
    def find_spec(name: str) -> ModuleSpec | None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert not official.available()


@needs_runtime
def test_a_program_runs_and_a_file_that_is_none_is_refused():
    outcome = official.run(_program(), [official.Call((torch.tensor([-1.0, 2.0]),))])
    assert isinstance(outcome, official.Ran), outcome
    assert outcome.methods == ["forward"]
    assert outcome.outputs[0][0].tolist() == [0, 2]
    assert isinstance(official.run(b"no program" * 10), official.LoadError)


@needs_runtime
def test_a_call_that_fails_is_told_by_its_number_and_the_worker_goes_on():
    good, bad = official.Call((torch.ones(2),)), official.Call((torch.ones(2),), "no_such")
    with official.OfficialRuntime() as runtime:
        outcome = runtime.run(official.Case(_program(), [good, bad]))
        assert isinstance(outcome, official.MethodError), outcome
        assert outcome.call == 1
        assert isinstance(runtime.run(official.Case(_program(), [good])), official.Ran)
        assert runtime.restarts == 0


@needs_runtime
def test_a_worker_that_dies_is_told_and_started_again(tmp_path):
    # An interpreter that ends at once stands for a runtime that aborts.
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -ABRT $$\n")
    python.chmod(0o755)
    with official.OfficialRuntime(python=str(python)) as runtime:
        for times in (1, 2):
            outcome = runtime.run(official.Case(_program()))
            assert isinstance(outcome, official.Crash), outcome
            assert outcome.signal == "SIGABRT"
            assert runtime.restarts == times


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
