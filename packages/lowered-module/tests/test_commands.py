"""The command ``lowerdeck lower``."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import re
import subprocess
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.lowered_module import LoweringError
from lowerdeck.lowered_module.commands import load_example, lower
from lowerdeck.lowered_module.program.held_messages import held_messages
from lowerdeck.lowered_module.testing import RunPartitioner
from lowerdeck.serializer import CommandError, open_pte

MODEL = """
import torch

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

class Branches(torch.nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def cannot_be_exported():
    return Branches(), (torch.ones(1),)

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count.add_(1)
        return x * self.count

def counts():
    return Counting(), (torch.ones(2),)

class Noisy(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

def noisy():
    return Noisy(), (torch.ones(8),)

class Determinant(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.det(x)

def no_kernel():
    return Determinant(), (torch.eye(2),)

def leaves():
    raise SystemExit(7)

class Leaves(torch.nn.Module):
    def forward(self, x):
        raise SystemExit(0)

def leaves_forward():
    return Leaves(), (torch.ones(1),)

class Add(torch.nn.Module):
    def forward(self, x, y):
        return x + y

class Doubles(torch.nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1

def doubles():
    return Doubles(), (torch.randn(1, 8),)

def listed():
    return Add(), [torch.ones(1), torch.ones(1)]

from lowerdeck.lowered_module.testing import RunPartitioner

class Everything(RunPartitioner):
    def __init__(self):
        super().__init__(lambda node: True)

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
    load = importlib.metadata.EntryPoint.load

    def loaded(entry: importlib.metadata.EntryPoint) -> Any:
        return everything if entry.name == "Try" else load(entry)

    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", loaded)
    return "command_model:example"


def lowerdeck(*words: str) -> int:
    """Run the installed script, as a user does."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="lowerdeck")
    return int(script.load()(list(words)))


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    lower.configure(parser)
    return lower.run(parser.parse_args(words))


def test_it_writes_a_file_and_says_what_it_did(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pte"
    page = tmp_path / "graph.html"
    assert run(model, "--backend", "Try", "-o", str(path), "--html", str(page)) == 0
    text = capsys.readouterr().out
    for word in ("nodes", "partitions     1 (1 to VerbatimBackend)", "delegated", "file size"):
        assert word in text
    for word in ("planned memory", "time", "from eager", str(path)):
        assert word in text
    assert page.read_text().startswith("<!")
    with open_pte(path) as file:
        assert file is not None


def test_a_check_that_cannot_be_made_is_an_error(model: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    has_runner = importlib.util.find_spec("lowerdeck.runner") is not None
    expected = "cannot be compared" if has_runner else "needs lowerdeck.runner: pip install"
    with pytest.raises(CommandError, match=expected) as caught:
        run(model, "--backend", "Try", "-o", str(path), "--check")
    assert caught.value.exit_status == 4


def test_check_compares_with_eager(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lowerdeck.runner")
    assert run(model, "-o", str(tmp_path / "m.pte"), "--check") == 0
    assert "differs by at most" in capsys.readouterr().out


def test_check_names_the_output_and_the_state_that_differ(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = pytest.importorskip("lowerdeck.runner")
    path, module = tmp_path / "m.pte", model.partition(":")[0]
    assert run(f"{module}:counts", "-o", str(path), "--check") == 0
    load = runner.load

    def stuck(content: Any) -> Any:
        program = load(content)
        method = program.method("forward")
        first: list[Any] = []

        def call(*inputs: Any) -> Any:
            first.append(method(*inputs))
            return first[0]

        call.state = lambda: {"count": torch.full((2,), 7.0)}  # type: ignore[attr-defined]
        return types.SimpleNamespace(method=lambda name: call)

    monkeypatch.setattr(runner, "load", stuck)
    assert run(f"{module}:counts", "-o", str(path), "--check") == 1
    text = capsys.readouterr().out
    assert "  output 0 in call 3: max 1.25, mean 1.25" in text
    assert "  state 'count' in call 3: max 4, mean 4" in text


def test_check_knows_models_that_write_what_they_are_given(model: str, tmp_path: Path) -> None:
    pytest.importorskip("lowerdeck.runner")
    module = model.partition(":")[0]
    assert run(f"{module}:doubles", "-o", str(tmp_path / "m.pte"), "--check") == 0


def test_auto_refuses_a_model_that_draws_at_random(model: str, tmp_path: Path) -> None:
    path, module = tmp_path / "m.pte", model.partition(":")[0]
    with pytest.raises(LoweringError, match="between two calls of eager with the same inputs"):
        run(f"{module}:noisy", "--auto", "-o", str(path))
    assert not path.exists()


def test_auto_refuses_a_backend_that_nobody_offers(model: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pte"
    with pytest.raises(LoweringError, match=r"'Mistyped' was not found\. Installed:"):
        run(model, "--auto", "--backend", "Mistyped", "-o", str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nothing", "expected MODULE:FACTORY"),
        ("no.such.module:f", "cannot be imported"),
        ("mymodel.py:f", "without .py: mymodel:f"),
        ("command_model:absent", "has no 'absent'"),
        ("command_model:wrong", "returned int"),
        ("command_model:number", "is a int, expected a function"),
        ("command_model:needs", "raised TypeError"),
        ("command_model:fails", "raised ZeroDivisionError: division by zero"),
        ("command_model:no_module", r"returned \(int, tuple\)"),
        ("command_model:cannot_be_exported", "torch.export cannot export"),
        ("command_model:leaves", "'command_model:leaves' raised SystemExit: 7"),
        ("command_model:leaves_forward", "'command_model:leaves_forward' returned: SystemExit: 0"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_line_of_error(
    model: str, factory: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert lowerdeck("lower", factory, "-o", str(tmp_path / "m.pte")) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not list(tmp_path.glob("*.pte"))


def test_a_module_that_fails_is_one_line_of_error(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_model.py").write_text("1 / 0\n")
    assert lowerdeck("lower", "broken_model:f", "-o", str(tmp_path / "m.pte")) == 3
    assert "cannot be imported: ZeroDivisionError" in capsys.readouterr().err


def test_a_module_that_ends_the_process_is_one_line_of_error(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaving_model.py").write_text("import sys; sys.exit(0)\n")
    assert lowerdeck("lower", "leaving_model:f", "-o", str(tmp_path / "m.pte")) == 3
    told = "'leaving_model' of 'leaving_model:f' cannot be imported: SystemExit: 0\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoPartitioner", "is a NoPartitioner without __call__ and ops_to_not_decompose"),
        ("example", "is a function without ops_to_not_decompose, expected a partitioner"),
        ("LeavesToo", "'command_model:LeavesToo' cannot be made .* SystemExit: 0"),
        ("LeavesLate", "'command_model:example' runs ended with SystemExit;"),
        ("LeavesEarly", "'command_model:example' runs ended with SystemExit: 5;"),
        ("SaysTooLittle", "ops_to_not_decompose of SaysTooLittle failed: TypeError"),
    ],
)
def test_a_partitioner_that_is_none_is_one_line_of_error(
    model: str, tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "m.pte")
    assert lowerdeck("lower", model, "--backend", f"command_model:{name}", "-o", output) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert not list(tmp_path.glob("*.pte"))


def test_a_device_may_be_the_output(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lowerdeck("lower", model, "-o", os.devnull) == 0
    assert "file size      0 B\n" in capsys.readouterr().out


_SCRIPT = "import sys; from lowerdeck.script import main; sys.exit(main())"


@pytest.mark.parametrize("debug", [False, True])
def test_a_failed_export_is_one_line_without_debug(
    model: str, tmp_path: Path, debug: bool
) -> None:
    words = ["lower", "command_model:cannot_be_exported", *(["--debug"] if debug else [])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    # The graph that torch prints on its own, and the traceback.
    assert any("def forward" in line for line in lines) == debug
    assert ("Traceback (most recent call last):" in lines) == debug
    assert debug or len(lines) == 1


@pytest.mark.parametrize(("closed", "status"), [("2>&-", 0), (">&- 2>&-", 4)])
def test_closed_streams_do_not_stop_the_lowering(
    model: str, tmp_path: Path, closed: str, status: int
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", _SCRIPT, "lower", model],
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == status
    assert (b"from eager" in done.stdout) == (status == 0)
    with open_pte(tmp_path / "model.pte") as file:
        assert file.method_names == ("forward",)


def test_held_messages_are_told_unless_something_fails(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("torch.held_messages_test")
    logger.propagate = False
    before = logging.StreamHandler(sys.stderr)
    logger.addHandler(before)
    try:
        with held_messages():
            within = logging.StreamHandler(sys.stderr)
            logger.warning("of a success")
            logger.addHandler(within)
            assert capsys.readouterr().err == ""
        assert capsys.readouterr().err == "of a success\n"
        with suppress(KeyError), held_messages():
            logger.warning("of a failure")
            raise KeyError
        assert capsys.readouterr().err == ""
        assert before.stream is within.stream is sys.stderr
        logger.warning("later")
        assert capsys.readouterr().err == "later\n" * 2
    finally:
        logger.handlers.clear()


def test_a_missing_kernel_and_a_full_disk_are_failures_here(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowerdeck("lower", "command_model:no_kernel", "-o", str(tmp_path / "m.pte")) == 4
    assert "have no kernel" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert lowerdeck("lower", model, "-o", str(tmp_path / "file" / "m.pte")) == 4
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-o", "a", "--html", "./a"], ("--html a is", "--output a names")),
        (["-o", "command_model.py"], ("--output command_model.py", "command_model:example")),
        (["--html", "source", "-o", "m"], ("--html source", "command_model:example")),
        (
            ["--backend", "part:Everything", "-o", "part.py"],
            ("--output part.py", "part:Everything"),
        ),
    ],
    ids=str,
)
def test_an_output_that_is_another_file_of_the_command_is_refused(
    model: str,
    words: list[str],
    named: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.py").write_text(MODEL)
    (tmp_path / "source").hardlink_to(tmp_path / "command_model.py")
    # Another test's module of that name lies elsewhere.
    monkeypatch.delitem(sys.modules, "command_model", raising=False)
    monkeypatch.delitem(sys.modules, "part", raising=False)
    assert lowerdeck("lower", model, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in named)
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"command_model.py", "part.py", "source"}
    assert (tmp_path / "command_model.py").read_text() == MODEL
    assert (tmp_path / "part.py").read_text() == MODEL


@pytest.mark.parametrize("option", ["-o", "--html"])
def test_no_folder_is_made_for_what_is_written(
    model: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    words = ["-o", str(tmp_path / "m.pte"), option, str(tmp_path / "no" / "deeper" / "file")]
    assert lowerdeck("lower", model, *words) == 4
    shown = capsys.readouterr()
    assert "there is no folder" in shown.err
    assert shown.out == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("text", ["nan", "-1", "-inf", "-1e-9", "much", "", "9" * 5000 + "x"])
def test_a_tolerance_that_is_none_is_a_wrong_argument(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        lowerdeck("lower", model, "-o", str(tmp_path / "m.pte"), f"--tolerance={text}")
    assert stop.value.code == 2
    assert "0 or more" in (shown := capsys.readouterr().err)
    assert len(shown) < 4000
    assert not (tmp_path / "m.pte").exists()


def test_an_unknown_backend_is_a_wrong_argument(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "m.pte")
    assert lowerdeck("lower", model, "--backend", "Nothing", "-o", output) == 2
    assert "'Nothing' was not found" in capsys.readouterr().err


def test_a_partitioner_can_be_named_by_its_class(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "m.pte"
    assert (
        lowerdeck("lower", model, "--backend", "command_model:Everything", "-o", str(output)) == 0
    )
    assert "VerbatimBackend" in capsys.readouterr().out
    assert (
        lowerdeck("lower", model, "--backend", "command_model:Demanding", "-o", str(output)) == 3
    )
    assert "cannot be made without arguments" in capsys.readouterr().err


def test_inputs_may_be_a_list(model: str) -> None:
    _, inputs, _ = load_example("command_model:listed")
    assert len(inputs) == 2


def test_a_model_is_loaded_in_evaluation_mode(model: str) -> None:
    module, inputs, named = load_example(model)
    assert not module.training
    assert torch.equal(inputs[0], torch.ones(1, 2))
    assert named == {}


def test_a_model_without_modes_is_taken_as_it_is(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: torch.nn.Module) -> torch.nn.Module:
        raise NotImplementedError("Calling train() or eval() is not supported")

    monkeypatch.setattr(torch.nn.Module, "eval", refuse)
    module, _, _ = load_example(model)
    assert isinstance(module, torch.nn.Module)
