"""Numbers in the pages are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lowerdeck.serializer import kernel_names, runtime_kernels
from lowerdeck.xnnpack.operators.table import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("page", "words", "number"),
    [
        ("SECURITY.md", "{} kernels", len(kernel_names())),
        ("docs/explanation/compatibility.md", "the same {} operators", len(runtime_kernels())),
        ("packages/xnnpack/README.md", "It takes {}\noperators", len(SUPPORTED)),
    ],
)
def test_pages_count_as_the_code_does(page, words, number):
    assert words.format(number) in (ROOT / page).read_text()


# The official runtime ends its process over some files, so who calls it starts another one; so
# does who tries whether what is installed can be loaded.
STARTS_ITSELF = (
    "language-models/src/lowerdeck/language_models/generating.py",
    "lowered-module/src/lowerdeck/lowered_module/choosing/official_runtime.py",
    "runner/src/lowerdeck/runner/commands/official.py",
    "serializer/src/lowerdeck/serializer/commands/loading.py",
)


def test_no_package_opens_connections_starts_programs_or_unpickles_files():
    refused = {
        "ftplib",
        "http",
        "marshal",
        "pickle",
        "requests",
        "shelve",
        "socket",
        "subprocess",
        "urllib",
    }
    for source in (ROOT / "packages").glob("*/src/**/*.py"):
        tree = ast.parse(source.read_text())
        for node in ast.walk(tree):
            names = [
                alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)
            ]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found = {name.split(".")[0] for name in names} & refused
            allowed = {"subprocess"} if source.as_posix().endswith(STARTS_ITSELF) else set()
            assert found <= allowed, source
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), source


def test_every_test_that_the_security_page_names_exists():
    page = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"\btest_\w+\.py|\bhostile_\w+\.py", page))
    files = [*ROOT.glob("packages/*/tests/*.py"), *ROOT.glob("tests/interop/*.py")]
    assert named - {path.name for path in files} == set()
    for file, test in re.findall(r"(test_\w+\.py)::(test_\w+)", page):
        assert any(f"def {test}(" in path.read_text() for path in files if path.name == file), test
