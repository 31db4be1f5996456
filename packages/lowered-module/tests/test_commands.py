"""The command ``lowerdeck lower``."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_helpers import install, lowerdeck, runs_without

from lowerdeck.lowered_module.inspect.accuracy import call_in_eager, call_sizes
from lowerdeck.serializer import Tensor, open_pte

MODEL = """
import torch
from lowerdeck_zoo import Of

def example():
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), (torch.ones(1, 2),)

def wrong():
    return 3

number = 3

def needs(argument):
    return example()

def fails():
    return 1 / 0

def no_module():
    return 3, (torch.ones(1),)

def cannot_be_exported():
    return Of(lambda x: x + 1 if x.sum() > 0 else x), (torch.ones(1),)

def counts():
    counting = Of(lambda self, x: x * self.count.add_(1), count=torch.zeros(2))
    return counting, (torch.ones(2),)

def no_kernel():
    return Of(torch.linalg.det), (torch.eye(2),)

def leaves():
    raise SystemExit(7)

def leaves_forward():
    return Of(lambda x: leaves()), (torch.ones(1),)

def doubles():
    return Of(lambda x: x.mul_(2) + 1), (torch.randn(1, 8),)

def listed():
    return Of(torch.add), [torch.ones(1), torch.ones(1)]

from lowerdeck.lowered_module import DeclarativeBackend, visits
from lowerdeck.lowered_module.testing import RunPartitioner

class Everything(RunPartitioner):
    def __init__(self):
        super().__init__(lambda node: True)

class Tanhs(DeclarativeBackend):
    @visits("aten.tanh")
    def tanh(self, part, node): pass
    def compile(self, part):
        return b""

tanhs = Tanhs()

class NoPartitioner:
    pass

class LeavesToo(Everything):
    def __init__(self):
        raise SystemExit(0)

class LeavesLate(Everything):
    def partition(self, program):
        raise SystemExit

class LeavesEarly(Everything):
    def ops_to_not_decompose(self, program):
        raise SystemExit(5)

class SaysTooLittle(Everything):
    def ops_to_not_decompose(self, program):
        return None

class Demanding(RunPartitioner):
    def __init__(self, wanted):
        super().__init__(wanted)

class Needing(Everything):
    def __init__(self):
        import a_compiler

def single():
    return torch.nn.Linear(4, 4), (torch.ones(1, 4),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of models, and an installed partitioner ``Try`` that leaves tanh."""
    (tmp_path / "command_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # Another test's module of that name is elsewhere.
    for name in ("command_model", "part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    install(monkeypatch, "lowerdeck.partitioners", {"Try": lambda: runs_without("tanh")})
    return "command_model:example"


def test_it_writes_a_file_and_a_report(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowerdeck("lower", model, "--backend", "Try", "-o", "m.pte", "--html", "g.html") == 0
    text = capsys.readouterr().out
    for word in ("nodes", "partitions     1 (1 to VerbatimBackend)", "delegated", "file size"):
        assert word in text
    for word in ("planned memory", "largest tensor", "time", "from eager", "m.pte"):
        assert word in text
    assert (tmp_path / "g.html").read_text().startswith("<!")
    with open_pte(tmp_path / "m.pte") as file:
        assert file.method_names == ("forward",)
    assert lowerdeck("lower", model, "-o", os.devnull) == 0
    assert "file size      0 B\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "words", "message"),
    [
        # The model that writes its input; the list of inputs.
        ("example", "--check", "differs by at most"),
        ("doubles", "--check", "differs by at most"),
        ("listed", "--check", "differs by at most"),
        ("counts", "--check", "differs by at most"),
        ("example", "--backend command_model:Everything", "VerbatimBackend"),
        ("example", "--backend command_model:Tanhs", "partitions     1 (1 to Tanhs)"),
        ("example", "--backend command_model:tanhs", "partitions     1 (1 to Tanhs)"),
    ],
)
def test_models_and_partitioners_may_have_several_forms(
    model: str,
    factory: str,
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--check" in words:
        pytest.importorskip("lowerdeck.runner")
    assert lowerdeck("lower", f"command_model:{factory}", *words.split()) == 0
    assert message in capsys.readouterr().out


SHAPES = """
import torch
from torch.export import Dim, export

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout()
    def forward(self, x, *, scale):
        return {"scaled": self.dropout(self.linear(x)) * scale}

INPUTS = (torch.ones(2, 4),), {"scale": torch.ones(2, 1)}

def training():
    return Scale(), *INPUTS

def evaluated():
    return Scale().eval(), *INPUTS

def dynamic():
    return Scale().eval(), *INPUTS, {"x": {0: Dim.AUTO}, "scale": {0: Dim.AUTO}}

def program():
    return export(Scale().eval(), *INPUTS)
"""


@pytest.mark.parametrize(
    ("words", "status", "message", "sizes"),
    [
        ("shapes_model:evaluated", 0, "from eager", [2, 4]),
        ("shapes_model:program", 0, "from eager", [2, 4]),
        (
            "shapes_model:evaluated --dynamic batch=1:8 --check",
            0,
            "compared at    input sizes [2, 4] [2, 1]; [1, 4] [1, 1]; [8, 4] [8, 1]\n",
            [8, 4],
        ),
        (
            "shapes_model:dynamic --bounds 16 --check",
            0,
            "input sizes [2, 4] [2, 1]; [16, 4] [16, 1]\n",
            [16, 4],
        ),
        ("shapes_model:dynamic --bounds x_0=6", 0, "from eager", [6, 4]),
        ("shapes_model:dynamic --bounds x.0=6", 0, "from eager", [6, 4]),
        (
            "shapes_model:training",
            0,
            "warning        shapes_model:training is in training",
            [2, 4],
        ),
        ("shapes_model:evaluated --backend Try", 0, "", [2, 4]),
        ("shapes_model:evaluated --backend TRY", 0, "backend        Try\n", [2, 4]),
        ("shapes_model:evaluated --backend Never", 0, "nothing was delegated to Never", [2, 4]),
        ("shapes_model:dynamic", 3, "has no upper bound", None),
        ("shapes_model:program --bounds 8", 2, "--bounds: the program has no dynamic", None),
        ("shapes_model:dynamic --dynamic batch=1:8", 3, "without dynamic_shapes", None),
        ("shapes_model:program --dynamic batch=1:8", 3, "without dynamic_shapes", None),
        ("shapes_model:program --auto --bounds 8", 2, "--auto and --bounds exclude", None),
    ],
)
def test_factories_may_give_programs_and_dynamic_shapes(
    model: str,
    words: str,
    status: int,
    message: str,
    sizes: list[int] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--check" in words:
        pytest.importorskip("lowerdeck.runner")
    (tmp_path / "shapes_model.py").write_text(SHAPES)
    monkeypatch.delitem(sys.modules, "shapes_model", raising=False)
    partitioners = {
        "Try": lambda: runs_without("mul"),
        "Never": lambda: runs_without(""),
    }
    install(monkeypatch, "lowerdeck.partitioners", partitioners)
    assert lowerdeck("lower", *words.split()) == status
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
    if sizes is not None:
        with open_pte(tmp_path / "model.pte") as file:
            plan = file.method("forward")
            tensor = plan.values[plan.inputs[0]].val
            assert isinstance(tensor, Tensor)
            assert tensor.sizes == sizes


@pytest.mark.parametrize(
    "words",
    [
        "--dynamic batch=8",
        "--dynamic x=1:8",
        "--dynamic batch=8:1",
        "--bounds x",
        "--bounds x=1=2",
    ],
)
def test_malformed_sizes_are_wrong_arguments(words: str, model: str) -> None:
    with pytest.raises(SystemExit) as stop:
        lowerdeck("lower", model, *words.split())
    assert stop.value.code == 2


def test_xnnpack_is_the_default_where_it_is_installed(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioners = {"XnnpackBackend": lambda: runs_without("tanh")}
    install(monkeypatch, "lowerdeck.partitioners", partitioners)
    assert lowerdeck("lower", model) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "backend        XnnpackBackend (the default; --backend none: portable kernels only)"
    )
    assert "partitions     1 (1 to VerbatimBackend)" in lines
    assert lowerdeck("lower", model, "--backend", "none") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "backend        none: portable kernels"
    assert "partitions     0" in lines


def test_a_check_that_cannot_be_made_is_an_error(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    has_runner = importlib.util.find_spec("lowerdeck.runner") is not None
    expected = "cannot be compared" if has_runner else "needs lowerdeck.runner: install"
    assert lowerdeck("lower", model, "--backend", "Try", "--check") == 4
    assert expected in capsys.readouterr().err


def test_a_bound_that_eager_rejects_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class PairsOnly(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[1]

    x = torch.ones(2, 3)
    calls, _ = call_in_eager(PairsOnly(), (x,), {}, 1, [((x[:1],), {}), ((x,), {})])
    assert call_sizes(calls) == ["[2, 3]"]
    assert "eager rejects it: index 1 is out of bounds" in caplog.text


def test_check_names_the_output_and_the_state_that_differ(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = pytest.importorskip("lowerdeck.runner")
    load = runner.load

    def stuck(content: Any) -> Any:
        method = load(content).method("forward")
        first: list[Any] = []

        def call(*inputs: Any) -> Any:
            first.append(method(*inputs))
            return first[0]

        call.state = lambda: {"count": torch.full((2,), 7.0)}  # type: ignore[attr-defined]
        return types.SimpleNamespace(method=lambda name: call)

    monkeypatch.setattr(runner, "load", stuck)
    assert lowerdeck("lower", "command_model:counts", "--check") == 1
    text = capsys.readouterr().out
    assert "  output 0 in call 3: max 1.25 (relative 0.56), mean 1.25" in text
    assert "  state 'count' in call 3: max 4 (relative 1.3), mean 4" in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        # Factories.
        ("nothing", 3, "expected MODULE:FACTORY"),
        ("no.such.module:f", 3, "cannot be imported"),
        ("mymodel.py:f", 3, "without .py: mymodel:f"),
        ("command_model:absent", 3, "has no attribute 'absent'"),
        ("command_model:wrong", 3, "returned a int"),
        ("command_model:number", 3, "is a int, expected a function"),
        ("command_model:needs", 3, "raised TypeError"),
        ("command_model:fails", 3, "raised ZeroDivisionError: division by zero"),
        ("command_model:no_module", 3, r"returned a \(int, tuple\)"),
        ("command_model:cannot_be_exported", 3, "torch.export cannot export"),
        ("command_model:leaves", 3, "'command_model:leaves' raised SystemExit: 7"),
        ("command_model:leaves_forward", 3, "'command_model:leaves_forward' returned: SystemExit"),
        ("command_model:no_kernel", 4, "have no kernel"),
        ("broken_model:f", 3, "cannot be imported: ZeroDivisionError"),
        ("leaving_model:f", 3, "'leaving_model' of .* cannot be imported: SystemExit: 0"),
        # Partitioners.
        ("{} --backend command_model:NoPartitioner", 3, "without __call__ and ops_to_not_decomp"),
        (
            "{} --backend command_model:example",
            3,
            "is a tuple without __call__ and ops_to_not_decompose",
        ),
        ("{} --backend command_model:LeavesToo", 3, "cannot be created .* SystemExit: 0"),
        ("{} --backend command_model:LeavesLate", 3, r"called sys.exit\(\) \(SystemExit\);"),
        ("{} --backend command_model:LeavesEarly", 3, r"called sys.exit\(\) \(SystemExit: 5\);"),
        ("{} --backend command_model:SaysTooLittle", 3, "of SaysTooLittle failed: TypeError"),
        ("{} --backend command_model:Demanding", 3, "cannot be created without arguments"),
        ("{} --backend command_model:Needing", 3, "needs the package 'a_compiler'"),
        ("{} --backend Nothing", 2, "'Nothing' was not found"),
        ("command_model:single --dynamic batch=1:8", 3, "has a batch of 1"),
        # Choosing the fastest.
        ("{} --auto --backend Mistyped", 2, r"'Mistyped' was not found\. Installed:"),
        ("{} --auto --quantize int8", 2, "use one of the two options"),
        # Files.
        ("{} -o file/m.pte", 4, "cannot write"),
        ("{} -o no/deeper/m.pte", 4, "there is no folder"),
        ("{} --html no/deeper/m.html", 4, "there is no folder"),
        ("{} -o a --html ./a", 2, "--html a is.*--output a names"),
    ],
)
def test_what_cannot_be_done_is_one_line_of_error(
    model: str,
    words: str,
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = {"file": "", "broken_model.py": "1 / 0\n"}
    texts["leaving_model.py"] = "import sys; sys.exit(0)\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert lowerdeck("lower", *words.format(model).split()) == status
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert re.search(message, line)
    left = {path.name: path for path in tmp_path.iterdir() if path.name != "__pycache__"}
    assert {name: path.read_bytes() for name, path in left.items()} == before


@pytest.mark.parametrize("text", ["nan", "-1", "-inf", "-1e-9", "much", "", "9" * 5000 + "x"])
def test_a_tolerance_that_is_none_is_a_wrong_argument(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        lowerdeck("lower", model, f"--tolerance={text}")
    assert stop.value.code == 2
    assert "0 or more" in (shown := capsys.readouterr().err)
    assert len(shown) < 4000
    assert not list(tmp_path.glob("*.pte"))


_SCRIPT = "import sys; from lowerdeck.script import main; sys.exit(main())"


@pytest.mark.parametrize("debug", [False, True])
def test_what_torch_prints_of_a_failed_export_is_shown_with_debug(
    model: str, debug: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["lower", "command_model:cannot_be_exported", *(["--debug"] if debug else [])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert any("def forward" in line for line in lines) == debug
    assert ("Traceback (most recent call last):" in lines) == debug
    # torch names the source line, and what to write instead.
    assert any("friendly APIs" in line for line in lines)


@pytest.mark.parametrize(("closed", "status"), [("2>&-", 0), (">&- 2>&-", 4)])
def test_closed_streams_do_not_stop_the_lowering(
    model: str, tmp_path: Path, closed: str, status: int
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", _SCRIPT, "lower", model],
        capture_output=True,
        check=False,
    )
    assert done.returncode == status
    assert (b"from eager" in done.stdout) == (status == 0)
    with open_pte(tmp_path / "model.pte") as file:
        assert file.method_names == ("forward",)


@pytest.mark.parametrize("fails", [False, True])
def test_messages_of_torch_are_shown_unless_something_fails(
    model: str, fails: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torch.held_messages_test")
    logger.propagate = False
    handlers = [logging.StreamHandler(sys.stderr)]
    logger.addHandler(handlers[0])
    export = torch.export.export

    def loud(*args: Any) -> Any:
        logger.warning("before")
        handlers.append(logging.StreamHandler(sys.stderr))
        logger.addHandler(handlers[1])
        if fails:
            raise KeyError("after")
        return export(*args)

    monkeypatch.setattr(torch.export, "export", loud)
    try:
        assert lowerdeck("lower", model) == (3 if fails else 0)
        assert ("before\n" in capsys.readouterr().err) is not fails
        assert all(one.stream is sys.stderr for one in handlers)
    finally:
        logger.handlers.clear()
