"""Write the few rows that the README shows, so that they are never older than the records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from benchmarks.harness import Row
from benchmarks.records import Record

# Package, how its row begins, what the README calls the job, and who the peer is.
JOBS = (
    (
        "graph_fuser",
        "fuse 10000 nodes, a partition for every 100",
        "fuse 10,000 nodes in 100 partitions",
        "ExecuTorch",
    ),
    ("graph_fuser", "propose_partitions, 4000 nodes", "propose partitions, 4,000 nodes", "torch"),
    (
        "lowered_module",
        "to_backend, 2000 nodes in 400 partitions",
        "`to_backend`, 2,000 nodes in 400 partitions",
        "ExecuTorch",
    ),
    ("emitter", "GPT-2-like 4x256: export to bytes", "export to bytes, GPT-2-like", "ExecuTorch"),
    (
        "decompose",
        "ViT of 12 layers, XNNPACK: exported program to bytes",
        "lower a ViT for XNNPACK, to bytes",
        "ExecuTorch",
    ),
    ("unflatten", "unflatten, 5000 layers", "unflatten 5,000 layers", "torch"),
)
_TABLE = re.compile(r"^\| job \|.*?\n\n", re.MULTILINE | re.DOTALL)


def with_table(readme: str, records: Sequence[Record]) -> str:
    """Return the README with its table of jobs as measured.

    Args:
        readme: The page as it is.
        records: What was measured, one of each package.

    Raises:
        ValueError: The page has no such table, or more than one.
    """
    if len(_TABLE.findall(readme)) != 1:
        raise ValueError("README.md must have one table that begins with '| job |'")
    table = "\n".join(_rows(records)) + "\n\n"
    return _TABLE.sub(lambda _: table, readme)


def _rows(records: Sequence[Record]) -> Iterator[str]:
    yield "| job | Lowerdeck | peer | ratio |"
    yield "|---|---:|---:|---:|"
    packages = {record.package: record.rows for record in records}
    for package, case, job, peer in JOBS:
        (row,) = (row for row in packages[package] if row.case.startswith(case))
        assert row.peer is not None, case
        assert row.ratio is not None, case
        ours, theirs = _seconds(row, row.ours), _seconds(row, row.peer)
        yield f"| {job} | {ours} | {theirs} ({peer}) | {_three_digits(row.ratio)}x |"


def _seconds(row: Row, value: float) -> str:
    # A row for each node tells in parentheses how many there are.
    if row.unit == "us/node" and (nodes := re.search(r"\((\d+) nodes\)", row.case)):
        value *= int(nodes[1]) / 1e6
    return f"{_three_digits(value)} s"


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
