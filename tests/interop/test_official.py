"""The harness around the official runtime tells outcomes apart and outlives them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowerdeck.emitter import OFFICIAL_KERNELS, emit
from lowerdeck_zoo import official

GOOD, BAD = official.Call((torch.tensor([-1.0, 2.0]),)), official.Call((torch.ones(2),), "no_such")
WRONG_TYPE = official.Call((torch.ones(2, dtype=torch.int8),))


@pytest.fixture(scope="module")
def program() -> bytes:
    return bytes(emit(torch.export.export(nn.ReLU(), (torch.ones(2),))).to_bytes())


@pytest.fixture
def runtime() -> Iterator[official.OfficialRuntime]:
    with official.OfficialRuntime() as runtime:
        yield runtime


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
    slow = official.Case(program, [GOOD] * 1000)
    assert isinstance(runtime.run(slow, timeout=0.0), official.TimedOut)
    assert isinstance(runtime.run(official.Case(program, [GOOD])), official.Ran)


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


def test_the_emitters_table_of_kernels_is_what_this_runtime_has():
    code = (
        f"import torch, {official.binding_name()} as binding\n"
        "print(*binding._get_operator_names(), sep='\\n')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) == set(OFFICIAL_KERNELS.names)
