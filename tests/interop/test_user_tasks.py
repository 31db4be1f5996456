"""Commands of the how-tos with wrong input: one line says what is wrong, nothing is written."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from lowerdeck.emitter import emit
from lowerdeck_zoo.models.libraries import import_torchvision

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.a(x))


def example():
    return Net().eval(), (torch.ones(1, 4),)


def raises():
    raise KeyError("weights")


def one():
    return Net()


def no_samples():
    return []


def bad_samples():
    yield (torch.ones(1, 9),)


value = 3
"""
INT8 = "lower good:example --backend XnnpackBackend --quantize int8 --calibrate"


_NO_TOKENS = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, its file, and files that are none."""
    found = tmp_path_factory.mktemp("tasks")
    (found / "good.py").write_text(MODEL)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()
    emit(torch.export.export(model, (torch.ones(1, 4),))).save(found / "good.pte")
    for name in ("nothing", "broken", "images"):
        (found / name).mkdir()
    for name, config in (("broken", "{"), ("images", '{"model_type": "resnet"}')):
        (found / name / "config.json").write_text(config)
        (found / name / "tokenizer.json").write_text(_NO_TOKENS)
    return found


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("lower gone:example", 3, "cannot be imported"),
        ("lower good:gone", 3, "has no 'gone'"),
        ("lower good:raises", 3, "raised KeyError: 'weights'"),
        ("lower good:one", 3, "returned Net, expected"),
        ("lower good:value", 3, "is a int, expected a function"),
        ("lower good:example --backend Gone", 2, "partitioner 'Gone' was not found"),
        (f"{INT8} good:no_samples", 3, "returned nothing"),
        (f"{INT8} good:bad_samples", 3, "do the model and the samples"),
        ("lower good:example --quantize int8", 2, "needs a --backend that quantises"),
        (f"{INT8.replace('int8', 'int7')} good:gone", 2, "does not quantise by 'int7'"),
        ("lm export gone", 3, "gone is no folder"),
        ("lm export nothing", 3, "nothing has no tokenizer.json"),
        ("lm export broken", 3, "broken/config.json is of no model"),
        ("lm export images", 3, "images has no *.safetensors"),
        ("lm run good.pte hello", 3, "there is no good.tokenizer.json"),
        ("run good.pte --input ones:2x2", 3, "has shape [2, 2]; at most [1, 4]"),
        ("run good.pte --method gone", 3, "there is no method 'gone'"),
    ],
)
def test_a_command_says_what_is_wrong_in_one_line(
    words: str,
    status: int,
    told: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words.startswith("lm"):
        import_torchvision()  # transformers imports it, which may be of another build
        pytest.importorskip("lowerdeck.language_models.commands")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "good", raising=False)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.*") if file.is_file()}
    (script,) = entry_points(group="console_scripts", name="lowerdeck")
    try:
        found = script.load()(words.split())
    except SystemExit as ended:
        found = ended.code
    printed = capfd.readouterr()
    assert found == status
    line = printed.err.strip().splitlines()[-1]
    assert line.startswith(f"lowerdeck {words.partition(' ')[0]}: ")
    assert told in line
    assert printed.out == ""
    after = {file: file.stat().st_mtime_ns for file in folder.rglob("*.*") if file.is_file()}
    assert {file for file in after if file.suffix != ".pyc"} == {
        file for file in before if file.suffix != ".pyc"
    }
