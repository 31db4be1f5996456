"""The conformance kit passes a right backend and finds what is wrong with others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from declarative_backends import Counting, Pocket, PocketRuntime
from lowered_helpers import backend

from lowerdeck.lowered_module import LoweringError, PartitionView, PreprocessResult
from lowerdeck.lowered_module.testing import (
    RunPartitioner,
    Sample,
    check_backend,
    default_samples,
    generated,
)
from lowerdeck_zoo import Of

COUNTING = Sample("counting", Counting(), (torch.ones(2),))
ADDING = Sample("adding", Of(lambda x: x + 1), (torch.tensor([1e4, 1e-3]),))


class Forgetful(Pocket):
    """Declares that it takes state, and forgets it."""

    def compile(self, part: PartitionView) -> bytes:
        return json.dumps({**json.loads(super().compile(part)), "state": {}}).encode()


class Deaf(PocketRuntime):
    """Returns for each call what it computed in the first."""

    def execute(self, handle: Any, inputs: Any) -> Any:
        if "first" not in handle:
            handle["first"] = super().execute(handle, inputs)
        return handle["first"]


class Off(PocketRuntime):
    """Is wrong where elements are small, by less than is allowed of the large ones."""

    def execute(self, handle: Any, inputs: Any) -> Any:
        return [one + torch.tensor([0.0, 0.01]) for one in super().execute(handle, inputs)]


class Colliding(Pocket):
    """Stores each weight under a key that is unique only in its partition."""

    def compile(self, part: PartitionView) -> bytes:
        for node, weight in part.constants.items():
            part.store(f"weight.{part.index(node)}", weight)
        return super().compile(part)


@pytest.mark.parametrize(
    ("compiler", "runtime", "sample", "words"),
    [
        (Pocket, PocketRuntime, COUNTING, ""),
        (Pocket, PocketRuntime, ADDING, ""),
        (Forgetful, PocketRuntime, COUNTING, "eager's in call 2 of 3: Tensor-likes"),
        (Pocket, Deaf, ADDING, "FAIL  the runtime computes what the module does"),
        (Pocket, Off, ADDING, "FAIL  the runtime computes what the module does"),
    ],
)
def test_numbers_and_state_are_compared_over_several_calls(
    compiler: type[Pocket], runtime: Any, sample: Sample, words: str
) -> None:
    pytest.importorskip("lowerdeck.runner")
    runtimes = {compiler.__name__: runtime()}
    report = check_backend(compiler.partitioner(), samples=[sample], runtimes=runtimes)
    assert report.passed == (not words), str(report)
    assert words in str(report)


def test_a_right_backend_passes() -> None:
    pytest.importorskip("lowerdeck.runner")
    samples = [generated(seed, 6, control_flow=False, dynamic=seed == 1) for seed in range(3)]
    runtimes = {"Pocket": PocketRuntime()}
    report = check_backend(Pocket.partitioner(), samples=samples, runtimes=runtimes)
    assert report.passed, str(report)
    assert "the runtime computes what the module does (3/3)" in str(report)


def test_named_data_keys_that_collide_are_found() -> None:
    report = check_backend(Colliding.partitioner(), samples=default_samples(()))
    assert not report.passed
    assert "FAIL  it can be written (0/1)" in str(report)
    assert "named data 'weight.1': found 64 bytes for a key that already holds" in str(report)


def test_bytes_that_change_and_wrong_debug_maps_are_found() -> None:
    calls: list[Any] = []

    def wrong(program: Any, specs: Any) -> PreprocessResult:
        calls.append(program)
        return PreprocessResult(str(len(calls)).encode(), {0: (10**6,)})

    with backend(wrong):
        partitioner = RunPartitioner(lambda _: True, backend_id="Custom")
        report = check_backend(partitioner, samples=[generated(1, 4, control_flow=False)])
    assert not report.passed
    assert "FAIL  lowering again gives the same blobs (0/1)" in str(report)
    assert "FAIL  debug maps name nodes of their partition (0/1)" in str(report)


def test_what_was_not_run_or_not_delegated_is_reported() -> None:
    report = check_backend(Pocket.partitioner(), samples=[COUNTING])
    assert report.passed
    (check,) = report.not_run
    assert check not in report.tried
    assert f"not run  {check}: " in str(report)
    assert str(report).endswith("the results of the files are unchecked")
    nothing = RunPartitioner(lambda _: False)
    sample = generated(1, 4, control_flow=False)
    with pytest.raises(LoweringError, match="sample 1 is a ExportedProgram, expected Sample"):
        check_backend(nothing, samples=[sample, sample.export()])  # type: ignore[list-item]
    report = check_backend(nothing, samples=[(sample.module, sample.inputs)])
    assert not report.passed
    assert "nothing was delegated" in str(report)
