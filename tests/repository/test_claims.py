"""Numbers in the pages are those of the code and of the benchmarks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lowerdeck.serializer import kernel_names, runtime_kernels
from lowerdeck.xnnpack.operators.table import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
# What the README calls a job, and how its row in the benchmarks begins.
JOBS = {
    "fuse 10,000 nodes in 100 partitions": "fuse 10000 nodes, a partition for every 100",
    "propose partitions, 4,000 nodes": "propose_partitions, 4000 nodes",
    "`to_backend`, 2,000 nodes in 400 partitions": "to_backend, 2000 nodes in 400 partitions",
    "export to bytes, GPT-2-like": "GPT-2-like 4x256: export to bytes",
    "lower a ViT for XNNPACK, to bytes": "lower vit for XNNPACK, to bytes",
    "unflatten 5,000 layers": "unflatten, 5000 layers",
}


def _measured(case: str) -> tuple[float, float, float]:
    """Return what a row of the benchmarks says of us, of the peer, and of the ratio."""
    text = (ROOT / "benchmarks/RESULTS.md").read_text()
    (row,) = re.findall(rf"^\| \S+ \| {re.escape(case)}[^|]*\|(.*)$", text, re.M)
    ours, theirs, ratio = (cell.strip() for cell in row.split("|")[:3])
    # A row for each node tells in parentheses how many there are.
    nodes = re.search(rf"{re.escape(case)} \((\d+) nodes\)", text)
    scale = int(nodes[1]) / 1e6 if nodes and ours.endswith("us/node") else 1.0
    return float(ours.split()[0]) * scale, float(theirs.split()[0]) * scale, float(ratio[:-1])


@pytest.mark.parametrize("job", JOBS)
def test_the_readme_shows_what_was_measured(job):
    readme = (ROOT / "README.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(job)} \|(.*)\|$", readme, re.M)
    shown = [float(re.sub("[ ,sx]|\\(.*", "", cell)) for cell in row.split("|")]
    assert shown == pytest.approx(_measured(JOBS[job]), rel=0.03)


def test_the_readme_shows_no_other_figures_beside_the_peers():
    (table,) = re.findall(r"\| job \|.*?\n\n", (ROOT / "README.md").read_text(), re.S)
    assert re.findall(r"^\| (.*?) \|", table, re.M)[1:] == list(JOBS)


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


# The official runtime ends its process over some files, so `lowerdeck lm run` starts another one.
STARTS_ITSELF = "language-models/src/lowerdeck/language_models/generating.py"


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
