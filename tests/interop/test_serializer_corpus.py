"""Files of ExecuTorch, re-written by us, run the same in the official runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowerdeck import serializer as pte
from lowerdeck_zoo import assert_close, official

CORPUS = Path(__file__).resolve().parent / "corpus"
pytestmark = [pytest.mark.skipif(not official.available(), reason=official.REASON)]
NAMES = sorted(path.stem for path in CORPUS.glob("*.pte"))


def _data(name: str) -> bytes:
    return (CORPUS / f"{name}.pte").read_bytes()


def _run(name: str, program: bytes, *, data: bytes | None = None) -> None:
    io = torch.load(CORPUS / f"{name}.io.pt", weights_only=True)
    calls = [official.Call(call["inputs"], call["method"]) for call in io["calls"]]
    outcome = official.run(program, calls, data=data)
    assert isinstance(outcome, official.Ran), outcome
    for call, found in zip(io["calls"], outcome.outputs, strict=True):
        assert_close(found, call["outputs"], atol=call["atol"], rtol=call["rtol"])


def _external(name: str) -> bytes | None:
    path = CORPUS / f"{name}.ptd"
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("name", NAMES)
def test_rewritten_files_run_the_same_and_are_never_larger(name: str) -> None:
    original = _data(name)
    written = pte.serialize_pte(pte.verify_pte(original))
    assert len(written) <= len(original)
    external = _external(name)
    if external is not None:
        external = pte.serialize_ptd(pte.deserialize_ptd(external))
    _run(name, written, data=external)
    assert pte.serialize_pte(pte.verify_pte(written)) == written


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("alignment", "extract"), [(1, True), (64, False), (4096, True)])
def test_other_layouts_run_the_same(name: str, extract: bool, alignment: int) -> None:
    aligned = dict.fromkeys(
        ("constant_tensor_alignment", "delegate_alignment"), max(alignment, 16)
    )
    aligned |= {"segment_alignment": alignment, "extract_delegate_segments": extract}
    written = pte.serialize_pte(pte.deserialize_pte(_data(name)), **aligned)
    _run(name, written, data=_external(name))


@pytest.mark.parametrize("alignment", [1, 16, 4096])
def test_external_data_with_other_alignments_run(alignment: int) -> None:
    found = pte.deserialize_ptd((CORPUS / "external_ptd.ptd").read_bytes())
    data = pte.serialize_ptd(pte.ExternalData(found.entries, alignment))
    _run("external_ptd", _data("external_ptd"), data=data)
