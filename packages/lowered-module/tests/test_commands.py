"""The command ``lowerdeck lower``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.lowered_module.commands import load_example, lower
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.testing import RunPartitioner
from lowerdeck.serializer import open_pte

MODEL = """
import torch

def example():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), (torch.ones(1, 2),)

def wrong():
    return 3
"""


def everything() -> RunPartitioner:
    return RunPartitioner(lambda node: "tanh" not in str(node.target))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "command_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        importlib.metadata.EntryPoint("Try", f"{__name__}:everything", "lowerdeck.partitioners")
    ]
    real = importlib.metadata.entry_points

    def found(**wanted: Any) -> Any:
        return entries if wanted == {"group": "lowerdeck.partitioners"} else real(**wanted)

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.setattr(
        importlib.metadata.EntryPoint, "load", lambda self: everything, raising=True
    )
    return "command_model:example"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    lower.configure(parser)
    return lower.run(parser.parse_args(words))


def test_it_writes_a_file_and_says_what_it_did(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "new" / "model.pte"
    page = tmp_path / "graph.html"
    assert run(model, "--backend", "Try", "-o", str(place), "--html", str(page)) == 0
    text = capsys.readouterr().out
    for word in ("nodes", "partitions     1 (1 to VerbatimBackend)", "delegated", "file size"):
        assert word in text
    for word in ("planned memory", "time", "from eager", str(place)):
        assert word in text
    assert page.read_text().startswith("<!")
    with open_pte(place) as file:
        assert file is not None


def test_a_check_that_cannot_be_made_is_an_error(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "model.pte"
    assert run(model, "--backend", "Try", "-o", str(place), "--check") == 1
    has_runner = importlib.util.find_spec("lowerdeck.runner") is not None
    expected = "cannot be compared" if has_runner else "needs lowerdeck.runner: pip install"
    assert expected in capsys.readouterr().err


def test_check_compares_with_eager(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lowerdeck.runner")
    assert run(model, "-o", str(tmp_path / "m.pte"), "--check") == 0
    assert "differs by at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nothing", "expected MODULE:FACTORY"),
        ("no.such.module:f", "cannot be imported"),
        ("mymodel.py:f", "without .py: mymodel:f"),
        ("command_model:absent", "has no 'absent'"),
        ("command_model:wrong", "returned int"),
    ],
)
def test_a_factory_that_cannot_be_used_is_an_error(
    model: str, factory: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LoweringError, match=message):
        load_example(factory)
    assert run(factory) == 1
    assert message in capsys.readouterr().err


def test_a_model_is_loaded_in_evaluation_mode(model: str) -> None:
    module, inputs, named = load_example(model)
    assert not module.training
    assert torch.equal(inputs[0], torch.ones(1, 2))
    assert named == {}
