"""Contents of payloads and files of the official compiler, as the serializer reports them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowerdeck import serializer as pte
from lowerdeck.inspect.report.operators import contents_of

HERE = Path(__file__).parent


def payloads(file: Path) -> Iterator[memoryview]:
    program = pte.deserialize_pte(file.read_bytes())
    for delegate in (one for plan in program.execution_plan for one in plan.delegates):
        if delegate.id == "XnnpackBackend":
            data = program.backend_delegate_data[delegate.processed.index].data
            yield memoryview(bytes(data))  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["corpus", "corpus_more"])
def test_files_of_the_official_compiler_are_read_whole_and_have_no_hazards(folder: str) -> None:
    files, schemes = sorted((HERE / folder).glob("*.pte")), set()
    assert files
    for file in files:
        hazards: list[pte.Hazard] = []
        pte.verify_pte(file.read_bytes(), on_hazard=hazards.append)
        assert hazards == [], file.name
        for blob in payloads(file):
            found, contents = pte.decode_payload(blob), contents_of(blob)
            assert not contents.closed
            assert sum(contents.operators.values()) == len(contents.lines) == len(found.nodes)
            assert not any("?" in line for line in contents.lines)
            assert len(found.values) == len({one.id for one in found.values})
            for one in found.values:
                if one.constant is not None and one.constant.key is None:
                    wanted = math.prod(one.shape) * one.dtype.bits // 8
                    assert one.constant.size == wanted
                if one.encoding.scheme:
                    schemes.add(one.encoding.scheme)
    assert schemes == (set() if folder == "corpus" else {"tensor", "channel", "token"})


def test_weights_that_no_file_brings_are_told(tmp_path: Path, shell: Any) -> None:
    whole = HERE / "corpus/conv_xnnpack.pte"
    made = pte.deserialize_pte(whole.read_bytes())
    data = pte.ExternalData({one.key: pte.ExternalEntry(one.data) for one in made.named_data})
    made.named_data.clear()
    path, weights = tmp_path / "bare.pte", tmp_path / "weights.ptd"
    path.write_bytes(pte.serialize_pte(made))
    weights.write_bytes(pte.serialize_ptd(data))
    hazards: list[pte.Hazard] = []
    pte.verify_pte(path.read_bytes(), on_hazard=hazards.append)
    assert all("from a .ptd file" in str(hazard) and hazard.needs for hazard in hazards)
    assert "or the process aborts" in shell("verify", path).out
    assert "warning" not in shell("verify", path, "--data", weights).out
