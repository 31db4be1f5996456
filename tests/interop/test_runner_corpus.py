"""The runner and the official runtime on files of ExecuTorch's own compiler, beside eager."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lowerdeck.runner import load
from lowerdeck.serializer import deserialize_pte, verify_pte
from lowerdeck_zoo import assert_close, official

CORPUS = Path(__file__).resolve().parent / "corpus"
NAMES = sorted(path.stem for path in CORPUS.glob("*.pte"))
# ExecuTorch 1.4.1, torchao 0.18: quantised and half-precision delegates, and a batch that varies.
MORE = CORPUS.parent / "corpus_more"
PATHS = {path.stem: path for folder in (CORPUS, MORE) for path in sorted(folder.glob("*.pte"))}
# Delegates for whose operators our runtime of XNNPACK has no counterpart.
OFFICIAL_ONLY = (
    {*PATHS}
    - {*NAMES}
    - {*("int8_conv", "int8_dynamic_linear", "half_linear", "float_dynamic_batch")}
)


def record_of(name: str) -> Any:
    return torch.load(PATHS[name].with_suffix(".io.pt"), weights_only=True)


def data_of(name: str, record: Any) -> Path | None:
    return PATHS[name].parent / record["ptd"] if record["ptd"] else None


@pytest.mark.parametrize("memory", ["strict", "poison"])
@pytest.mark.parametrize("name", sorted({*PATHS} - OFFICIAL_ONLY))
def test_our_runner_gives_what_eager_gave(name: str, memory: Literal["strict", "poison"]) -> None:
    delegated = b"XnnpackBackend" in PATHS[name].read_bytes()
    if delegated and not entry_points(group="lowerdeck.runtimes", name="XnnpackBackend"):
        pytest.skip("no installed package registers a runtime half for XnnpackBackend")
    record = record_of(name)
    program = load(PATHS[name], data=data_of(name, record), memory=memory)
    for call in record["calls"]:
        got = program.method(call["method"]).run_flat(call["inputs"])
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


@pytest.mark.skipif(not official.available(), reason=official.REASON)
@pytest.mark.parametrize("from_bytes", [True, False])
@pytest.mark.parametrize("name", PATHS)
def test_the_official_runtime_gives_what_eager_gave(name: str, from_bytes: bool) -> None:
    record = record_of(name)
    program: Any = PATHS[name]
    data: Any = data_of(name, record)
    if from_bytes:
        program, data = program.read_bytes(), data and data.read_bytes()
        assert verify_pte(program) == deserialize_pte(program)
    calls = [official.Call(tuple(call["inputs"]), call["method"]) for call in record["calls"]]
    outcome = official.run(program, calls, data=data)
    assert isinstance(outcome, official.Ran), outcome
    for got, call in zip(outcome.outputs, record["calls"], strict=True):
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])
