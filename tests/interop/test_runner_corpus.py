"""The runner on files of ExecuTorch's own compiler, beside eager and the official runtime."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lowerdeck.runner import load
from lowerdeck_zoo import assert_close, official

CORPUS = Path(__file__).resolve().parent / "corpus"
NAMES = sorted(path.stem for path in CORPUS.glob("*.pte"))


def require_backend(name: str) -> None:
    delegated = b"XnnpackBackend" in (CORPUS / f"{name}.pte").read_bytes()
    if delegated and not entry_points(group="lowerdeck.runtimes", name="XnnpackBackend"):
        pytest.skip("no installed package registers a runtime half for XnnpackBackend")


def record_of(name: str) -> Any:
    return torch.load(CORPUS / f"{name}.io.pt", weights_only=True)


@pytest.mark.parametrize("memory", ["strict", "poison"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_eager(name: str, memory: Literal["strict", "poison"]) -> None:
    require_backend(name)
    record = record_of(name)
    data = CORPUS / record["ptd"] if record["ptd"] else None
    program = load(CORPUS / f"{name}.pte", data=data, memory=memory)
    for call in record["calls"]:
        got = program.method(call["method"]).run_flat(call["inputs"])
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


@pytest.mark.skipif(not official.available(), reason=official.REASON)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_official_runtime(name: str) -> None:
    require_backend(name)
    record = record_of(name)
    data = (CORPUS / record["ptd"]).read_bytes() if record["ptd"] else None
    content = (CORPUS / f"{name}.pte").read_bytes()
    calls = [official.Call(tuple(call["inputs"]), call["method"]) for call in record["calls"]]
    outcome = official.run(content, calls, data=data)
    assert isinstance(outcome, official.Ran), outcome
    program = load(content, data=data)
    for call, expected in zip(calls, outcome.outputs, strict=True):
        got = program.method(call.method).run_flat(call.inputs)
        assert_close(got, expected, atol=1e-5, rtol=1e-5)
