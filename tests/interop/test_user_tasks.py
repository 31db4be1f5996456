"""Seven tasks of the how-tos, each begun with five kinds of wrong input.

What is wrong is said in one line of a command, or by one typed error of ours, with what was
expected; nothing is written.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    DeclarativeBackend,
    LoweringError,
    SupportedOp,
    to_backend,
    visits,
)
from lowerdeck.runner import InputError, ProgramError, compare, load
from lowerdeck.unflatten import unflatten
from lowerdeck.unflatten.errors import UnflattenError

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
    (found / "cut.pte").write_bytes((found / "good.pte").read_bytes()[:200])
    (found / "text.pte").write_text("hello, this is no model")
    (found / "empty.pte").touch()
    for name in ("folder.pte", "nothing", "broken", "images"):
        (found / name).mkdir()
    for name, config in (("broken", "{"), ("images", '{"model_type": "resnet"}')):
        (found / name / "config.json").write_text(config)
        (found / name / "tokenizer.json").write_text(_NO_TOKENS)
    return found


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        # Read a file
        ("inspect gone.pte", 3, "gone.pte: No such file"),
        ("inspect cut.pte", 3, "cut.pte: TruncatedError: header.program_size at byte 16: found"),
        ("inspect text.pte", 3, "text.pte: MagicError: file identifier at byte 4: found b'o, t'"),
        ("inspect empty.pte", 3, "empty.pte: TruncatedError: file: found 0 bytes, expected"),
        ("inspect folder.pte", 3, "folder.pte: Is a directory"),
        # Look at pictures
        ("diff good.pte gone.pte", 3, "gone.pte: No such file"),
        ("diff cut.pte good.pte", 3, "cut.pte: TruncatedError"),
        ("diff good.pte text.pte", 3, "text.pte: MagicError"),
        ("diff good.pte good.pte --html gone/a.html", 4, "there is no folder gone; make it"),
        ("diff good.pte good.pte --html good.pte", 2, "nothing was written, give another path"),
        # From a model to a file
        ("lower gone:example", 3, "cannot be imported (No module named 'gone'): install it, or"),
        ("lower good:gone", 3, "has no 'gone'"),
        ("lower good:raises", 3, "raised KeyError: 'weights'; it is called without arguments"),
        ("lower good:one", 3, "returned Net, expected (module, example_args) or"),
        (
            "lower good:value",
            3,
            "is a int, expected a function that returns (module, example_args",
        ),
        ("lower good:example --backend Gone", 2, "partitioner 'Gone' was not found. Installed: "),
        # Quantise
        (f"{INT8} good:no_samples", 3, "returned nothing, expected a function without arguments"),
        (f"{INT8} good:bad_samples", 3, "do the model and the samples to calibrate with fit each"),
        (f"{INT8} good:gone", 3, "has no 'gone'"),
        ("lower good:example --quantize int8", 2, "needs a --backend that quantises; installed"),
        (
            "lower good:example --backend XnnpackBackend --quantize int7",
            2,
            "does not quantise by 'int7', but by int8 (",
        ),
        # Language models
        ("lm export gone", 3, "gone is no folder, expected one of a Hugging Face model"),
        ("lm export nothing", 3, "nothing has no tokenizer.json, nor another tokenizer"),
        ("lm export broken", 3, "broken/config.json is of no model that the installed"),
        ("lm export images", 3, "images has no *.safetensors, expected the weights of the model"),
        ("lm run good.pte hello", 3, "there is no good.tokenizer.json: name the model's folder"),
        # Run a file, and debug a wrong number
        ("run good.pte --input ones:2x2", 3, "has shape [2, 2]; at most [1, 4] was expected"),
        ("run good.pte --input gone.pt", 3, "gone.pt is neither a file nor an input: one input"),
        ("run good.pte --input 3", 3, "args[0] has shape []; [1, 4] was expected"),
        ("run good.pte --input ones --input ones", 3, "2 inputs are given; the method takes 1"),
        ("run good.pte --method gone", 3, "there is no method 'gone'; the program has forward"),
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


class Tanhs(DeclarativeBackend):
    """Takes tanh, and does not say what becomes of it."""

    supported = (SupportedOp("aten.tanh"),)

    def compile(self, part: Any) -> bytes:
        return b"tanh"


class ReturnsText(Tanhs):
    """Gives no bytes."""

    @visits("aten.tanh")
    def tanh(self, part: Any, node: Any) -> None:
        part.emit("tanh")

    def compile(self, part: Any) -> bytes:
        text: Any = "tanh"
        return text


class Raises(ReturnsText):
    """Fails while visiting."""

    @visits("aten.tanh")
    def tanh(self, part: Any, node: Any) -> None:
        raise KeyError("tanh")


@pytest.fixture(scope="module")
def exported(folder: Path) -> Any:
    """Return the model, its inputs and its program."""
    sys.path.insert(0, str(folder))
    try:
        model, inputs = importlib.import_module("good").example()
    finally:
        sys.path.remove(str(folder))
    return model, inputs, torch.export.export(model, inputs)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Tanhs.partitioner, "cannot compile aten.tanh.default (node 'tanh', from "),
        (
            ReturnsText.partitioner,
            "whose processed_bytes is a str: return a PreprocessResult with",
        ),
        (Raises.partitioner, "KeyError: 'tanh'\nwhile visiting aten.tanh.default (node 'tanh', "),
        (
            lambda: Tanhs,
            "found the class Tanhs as partitioner, expected an object: give Tanhs.par",
        ),
        (lambda: SupportedOp("tanh"), "found 'tanh' as an operator, expected 'aten.tanh'"),
    ],
)
def test_an_author_of_a_backend_is_told(given: Any, told: str, exported: Any) -> None:
    _, _, program = exported
    before = str(program.graph)
    with pytest.raises(LoweringError) as error:
        to_backend(program, given())
    assert told in str(error.value)
    assert str(program.graph) == before


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        (lambda f, m, x, p: compare("good.pte", m, x), InputError, "found a str as the program"),
        (lambda f, m, x, p: compare(f, None, x), InputError, "found a NoneType as the model, exp"),
        (
            lambda f, m, x, p: compare(f, m, x[0]),
            InputError,
            "found a Tensor as the inputs, expec",
        ),
        (
            lambda f, m, x, p: compare(f, m, (torch.ones(2, 9),)),
            InputError,
            "args[0] has shape [2, 9]; [1, 4] was expected",
        ),
        (
            lambda f, m, x, p: load("good.pte", debug=p),
            ProgramError,
            "found a ExportedProgram as debug, expected what emit returned, or None",
        ),
    ],
)
def test_who_looks_for_a_wrong_number_is_told(
    given: Any,
    kind: type[Exception],
    told: str,
    folder: Path,
    exported: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(kind) as error:
        given(load("good.pte"), *exported)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        (lambda m, p: unflatten(m), UnflattenError, "expected an ExportedProgram; found a Net."),
        (lambda m, p: unflatten(p)(torch.ones(1, 9)), UnflattenError, "x.shape[1] must be 4; fo"),
        # As torch's own modules say these, with where the call stands.
        (lambda m, p: unflatten(p)(), TypeError, "missing 1 required positional argument: 'x'"),
        (lambda m, p: _swapped(p, None), UnflattenError, "calls its child 'a', but no module is"),
        (lambda m, p: _swapped(p, m.forward), TypeError, "cannot assign"),
        (
            lambda m, p: _swapped(p, torch.nn.Linear(9, 4)),
            RuntimeError,
            "(in \"a = self._modules['a'](x)\", which is ",
        ),
    ],
)
def test_who_swaps_a_layer_is_told(
    given: Any, kind: type[Exception], told: str, exported: Any
) -> None:
    model, _, program = exported
    with pytest.raises(kind) as error:
        given(model, program)
    assert told in str(error.value)


def _swapped(program: Any, module: Any) -> Any:
    whole = unflatten(program)
    whole.a = module
    return whole(torch.ones(1, 4))
