"""Rules on shipped sources that neither ruff nor import-linter can check."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))
# They import the official runtime, which aborts on some files, in a process of its own.
MAY_START_PROCESSES = (
    "runner/official_runtime.py",
    "inspect/commands/doctor.py",
)
NETWORK_AND_PICKLES = frozenset(
    {"ftplib", "http", "marshal", "pickle", "requests", "shelve", "socket", "subprocess", "urllib"}
)
# ``Tensor.data_ptr`` and ``Tensor.numpy`` materialise lazy copies; ``data_address`` and
# ``bytes_of`` of torch-base do not. These modules call them on small tensors of their own.
MAY_MATERIALIZE = (
    "openvino/operators/norms.py",
    "openvino/translation.py",
    "openvino/runtime.py",
)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p).rpartition("/lowerdeck/")[2])
def test_no_module_connects_starts_programs_unpickles_or_copies_weights(path: Path) -> None:
    allowed = {"subprocess"} if path.as_posix().endswith(MAY_START_PROCESSES) else set()
    for node in ast.walk(_tree(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert {name.split(".")[0] for name in names} & NETWORK_AND_PICKLES <= allowed
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only=True" in ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr in {"data_ptr", "numpy"}:
            assert path.as_posix().endswith(MAY_MATERIALIZE), f"line {node.lineno}"
