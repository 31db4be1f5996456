"""What the serializer tells of payloads and files that the official compiler made."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lowerdeck import serializer as pte
from lowerdeck.script import main
from lowerdeck.serializer.report.operators import contents_of

HERE = Path(__file__).parent


def _files(folder: str) -> list[Path]:
    files = sorted((HERE / folder).glob("*.pte"))
    assert files
    return files


@pytest.mark.parametrize("folder", ["corpus", "corpus_more"])
def test_payloads_of_the_official_compiler_are_read(folder: str) -> None:
    files = _files(folder)
    schemes = set()
    for file in files:
        program = pte.deserialize_pte(file.read_bytes())
        for plan in program.execution_plan:
            for delegate in plan.delegates:
                if delegate.id == "XnnpackBackend":
                    blob = program.backend_delegate_data[delegate.processed.index].data
                    found = pte.decode_payload(bytes(blob))  # type: ignore[arg-type]
                    assert len(found.values) == len({one.id for one in found.values})
                    for one in found.values:
                        if one.constant is not None and one.constant.key is None:
                            wanted = math.prod(one.shape) * one.dtype.bits // 8
                            assert one.constant.size == wanted
                        if one.quantization is not None:
                            schemes.add(one.quantization.scheme)
    assert schemes == (set() if folder == "corpus" else {"tensor", "channel", "token"})


@pytest.mark.parametrize("folder", ["corpus", "corpus_more"])
def test_payloads_of_the_official_compiler_are_told_whole(folder: str) -> None:
    files = _files(folder)
    for file in files:
        program = pte.deserialize_pte(file.read_bytes())
        for plan in program.execution_plan:
            for delegate in plan.delegates:
                if delegate.id != "XnnpackBackend":
                    continue
                data = program.backend_delegate_data[delegate.processed.index].data
                blob = memoryview(bytes(data))  # type: ignore[arg-type]
                found, whole = contents_of(blob), pte.decode_payload(blob)
                assert not found.closed
                assert sum(found.operators.values()) == len(found.lines) == len(whole.nodes)
                assert not any("?" in line for line in found.lines)


@pytest.mark.parametrize("folder", ["corpus", "corpus_more"])
def test_ordinary_files_have_no_hazards(folder: str) -> None:
    files = _files(folder)
    for file in files:
        hazards: list[pte.Hazard] = []
        pte.verify_pte(file.read_bytes(), on_hazard=hazards.append)
        assert hazards == [], file.name


def test_weights_that_no_file_brings_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert main(["verify", str(path)]) == 0
    assert "without which the process ends" in capsys.readouterr().out
    assert main(["verify", str(path), "--data", str(weights)]) == 0
    assert "warning" not in capsys.readouterr().out
