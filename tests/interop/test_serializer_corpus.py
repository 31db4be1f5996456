"""Files of ExecuTorch, re-written by us, run the same in the official runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("name", NAMES)
def test_alignments_are_kept(name: str) -> None:
    asked = json.loads((CORPUS / "manifest.json").read_text())[name]["alignments"]
    written = pte.serialize_pte(pte.deserialize_pte(_data(name)))
    file = pte.PteFile(written)
    base = file.header.segment_base_offset if file.header else 0
    used = [segment for segment in file.segments if segment.size]
    assert all((base + segment.offset) % asked["segment"] == 0 for segment in used)
    constants = file.constant_segment
    assert constants is not None
    assert all(offset % asked["tensor"] == 0 for offset in constants.offsets)
    for entry in file.delegates:
        if entry.location is pte.DataLocation.INLINE:
            assert written.index(bytes(entry.data)) % asked["delegate"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_readers_find_the_facts_of_the_manifest(name: str) -> None:
    facts: dict[str, Any] = json.loads((CORPUS / "manifest.json").read_text())[name]["facts"]
    file = pte.PteFile(_data(name))
    header, expected = file.header, facts["extended_header"]
    assert (header is None) == (not expected)
    assert all(getattr(header, field) == value for field, value in (expected or {}).items())
    assert [[segment.offset, segment.size] for segment in file.segments] == facts["segments"]
    assert file.version == facts["version"]
    assert sorted(file.method_names) == sorted(facts["methods"])
    for method, told in facts["methods"].items():
        plan = file.method(method)
        assert len(plan.values) == told["n_values"]
        kinds = [type(value.val).__name__ for value in plan.values]
        assert {kind: kinds.count(kind) for kind in kinds} == told["value_kinds"]
        assert sum(len(chain.instructions) for chain in plan.chains) == told["n_instructions"]
        names = [operator.full_name for operator in plan.operators]
        assert sorted(names) == sorted(told["operators"])
        assert plan.non_const_buffer_sizes == told["non_const_buffer_sizes"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["trailing bytes", "old header", "longer header"])
def test_other_forms_of_the_header_run_and_are_read(name: str, change: str) -> None:
    data = bytearray(_data(name))
    if change == "trailing bytes":
        data += b"left over"
    elif data[8:12] != b"eh00":
        pytest.skip("the file has no extended header")
    elif change == "old header":
        data[12:16] = (24).to_bytes(4, "little")
        data[32:40] = bytes(8)
    else:
        # Zeros follow the header wherever an alignment above 32 widened the space for it.
        length = 40 if not any(data[40:48]) else 32
        data[12:16] = length.to_bytes(4, "little")
    _run(name, bytes(data), data=_external(name))
    assert pte.verify_pte(data) == pte.deserialize_pte(_data(name))


@pytest.mark.parametrize("alignment", [1, 16, 4096])
def test_external_data_with_other_alignments_run(alignment: int) -> None:
    found = pte.deserialize_ptd((CORPUS / "external_ptd.ptd").read_bytes())
    data = pte.serialize_ptd(pte.ExternalData(found.entries, alignment))
    _run("external_ptd", _data("external_ptd"), data=data)
