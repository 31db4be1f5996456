"""Files of ExecuTorch's own compiler, as they are and rewritten by us, in both runtimes."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lowerdeck.runner import load
from lowerdeck.serializer import (
    ExternalData,
    deserialize_ptd,
    deserialize_pte,
    serialize_ptd,
    serialize_pte,
    verify_pte,
)
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
        pytest.skip("no installed package registers a runtime for XnnpackBackend")
    record = record_of(name)
    program = load(PATHS[name], data=data_of(name, record), memory=memory)
    for call in record["calls"]:
        got = program.method(call["method"]).run_flat(call["inputs"])
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


def _check(name: str, program: Any, data: Any) -> None:
    record = record_of(name)
    calls = [official.Call(tuple(call["inputs"]), call["method"]) for call in record["calls"]]
    outcome = official.run(program, calls, data=data)
    assert isinstance(outcome, official.Ran), outcome
    for got, call in zip(outcome.outputs, record["calls"], strict=True):
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


def _external(name: str) -> bytes | None:
    path = data_of(name, record_of(name))
    return path.read_bytes() if path else None


@pytest.mark.parametrize("name", PATHS)
def test_the_official_runtime_gives_what_eager_gave(name: str) -> None:
    content = PATHS[name].read_bytes()
    assert verify_pte(content) == deserialize_pte(content)
    _check(name, content, _external(name))
    _check(name, PATHS[name], data_of(name, record_of(name)))


@pytest.mark.parametrize("name", PATHS)
def test_rewritten_files_run_the_same_and_are_never_larger(name: str) -> None:
    original, external = PATHS[name].read_bytes(), _external(name)
    written = serialize_pte(verify_pte(original))
    assert len(written) <= len(original)
    _check(name, written, external and serialize_ptd(deserialize_ptd(external)))
    assert serialize_pte(verify_pte(written)) == written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("alignment", "extract"), [(1, True), (64, False), (4096, True)])
def test_other_layouts_run_the_same(name: str, extract: bool, alignment: int) -> None:
    names = ("constant_tensor_alignment", "delegate_alignment")
    aligned = dict.fromkeys(names, max(alignment, 16))
    aligned |= {"segment_alignment": alignment, "extract_delegate_segments": extract}
    external = _external(name)
    if external is not None:
        external = serialize_ptd(ExternalData(deserialize_ptd(external).entries, alignment))
    written = serialize_pte(deserialize_pte(PATHS[name].read_bytes()), **aligned)
    _check(name, written, external)
