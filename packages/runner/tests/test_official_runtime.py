"""The process of the official runtime, with a binding made up here that misbehaves on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import OfficialRuntime, OfficialRuntimeError
from lowerdeck.serializer import serialize_pte

BINDING = """
import os, sys, time

def _get_registered_backend_names():
    return ["XnnpackBackend"]

class Module:
    def run_method(self, method, inputs):
        sys.stdout.write("x" * (1 << 20))
        os.write(2, b"y" * (1 << 20) + b"\\n")
        if method == "refuse":
            raise RuntimeError("no such method")
        if method == "sleep":
            time.sleep(3600)
        if method == "end":
            os.abort()
        if method == "complain":
            sys.exit("\\xff: no such operator\\n")
        return [inputs[0] + 1, 7]

    def load_method(self, name):
        return self

    def call(self, inputs):
        return [inputs[0] * 2]

def _load_for_executorch(path, *data):
    if path.endswith("bad.pte"):
        raise RuntimeError("not a program")
    return Module()

_load_program = _load_for_executorch
"""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfficialRuntime:
    folder = tmp_path / "executorch/extension/pybindings"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "_portable_lib.py").write_text(BINDING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        "lowerdeck.runner.official_runtime.official_binding_name", lambda: "made up"
    )
    monkeypatch.setattr("lowerdeck.runner.official_runtime.version", lambda name: "9.9")
    return OfficialRuntime(extra_kernels=True, patience=60)


def test_a_file_is_loaded_and_called_whatever_the_runtime_prints(
    runtime: OfficialRuntime,
) -> None:
    with runtime:
        assert runtime.name == "the official ExecuTorch runtime (9.9)"
        assert runtime.backends() == ["XnnpackBackend"]
        runtime.load("model.pte", "model.ptd")
        calls = runtime.run([torch.ones(2), None, 3], repeat=4)
        assert len(calls.seconds) == 4
        assert calls.outputs[0].tolist() == [2, 2]
        assert calls.outputs[1] == 7
        runtime.load("model.pte", methods=["forward"])
        assert runtime.run([torch.ones(2)]).outputs[0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("refuse", "RuntimeError: no such method"),
        ("end", "its process ended with -6"),
        ("complain", "no such operator"),
    ],
)
def test_a_failing_call_is_one_error_and_the_next_file_runs(
    method: str, reason: str, runtime: OfficialRuntime
) -> None:
    with runtime:
        runtime.load("model.pte")
        with pytest.raises(
            OfficialRuntimeError, match=f"the official runtime failed on model.pte: .*{reason}"
        ):
            runtime.run([torch.ones(2)], method)
        runtime.load("model.pte")
        assert runtime.run([torch.ones(2)]).outputs[1] == 7


def test_a_refused_file_and_an_endless_call_are_errors(
    runtime: OfficialRuntime, method: Any, tmp_path: Path
) -> None:
    for backend in ("XnnpackBackend", "Ring"):
        method.delegate(backend, [])
    (tmp_path / "bad.pte").write_bytes(serialize_pte(method.ends([], [])))
    with runtime:
        with pytest.raises(OfficialRuntimeError, match=r"not a program$"):
            runtime.load("absent/bad.pte")
        missing = r"not a program; backend 'Ring' is not registered .* which has: XnnpackBackend$"
        with pytest.raises(OfficialRuntimeError, match=missing):
            runtime.load(tmp_path / "bad.pte")
        runtime.load("model.pte")
        runtime._patience = 0.5
        with pytest.raises(OfficialRuntimeError, match="no response within 0 s"):
            runtime.run([torch.ones(2)], "sleep")


def test_a_missing_runtime_names_what_to_install(
    runtime: OfficialRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowerdeck.runner.official_runtime.official_binding_name", lambda: None)
    with runtime, pytest.raises(OfficialRuntimeError, match="pip install --no-deps executorch"):
        runtime.backends()


def test_modules_of_the_current_folder_are_not_imported(
    runtime: OfficialRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = tmp_path / "current"
    current.mkdir()
    for name in ("torch", "executorch", "numpy", "pickle", "json"):
        (current / f"{name}.py").write_text("import sys; sys.exit('of the current folder')\n")
    monkeypatch.chdir(current)
    with runtime:
        assert runtime.backends() == ["XnnpackBackend"]
