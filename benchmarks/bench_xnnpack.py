"""The XNNPACK backend beside ExecuTorch's: time to lower, delegates, and speed of the files.

Each figure is taken in a process of its own: both projects call their backend ``XnnpackBackend``,
as the runtime does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.workers import MODELS, PEER_PORTABLE, PRELUDE, REPORT, RUN, worker

PACKAGE = "xnnpack"

_OURS = """
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
times = []
for _ in range(3):
    start = time.process_time()
    program = to_backend(exported, XnnpackPartitioner())
    file = emit(program).to_bytes()
    times.append(time.process_time() - start)
seconds = sorted(times)[1]
graph = program.graph
"""
_OURS_PORTABLE = """
from lowerdeck.emitter import emit
start = time.process_time()
file = emit(exported).to_bytes()
seconds = time.process_time() - start
graph = exported.graph
"""
_PEER = """
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
start = time.process_time()
edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
graph = edge.exported_program().graph
file = edge.to_executorch().buffer
seconds = time.process_time() - start
"""


_CODES = {
    "ours": _OURS,
    "portable": _OURS_PORTABLE,
    "peer": _PEER,
    "peer_portable": PEER_PORTABLE,
}


def rows(quick: bool) -> Iterator[Row]:
    """Yield time to lower and time to run for each model, beside the peer."""
    for model in MODELS[:1] if quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            yield from _lowering_rows(model, Path(folder))
            yield from _running_rows(model, Path(folder))


def lowering_rows(model: str) -> list[Row]:
    """Return what lowering one of the examples costs and gives, beside the peer."""
    with tempfile.TemporaryDirectory() as folder:
        return list(_lowering_rows(model, Path(folder)))


def _lowering_rows(model: str, folder: Path) -> Iterator[Row]:
    ours, peer = (
        worker(PRELUDE + _CODES[name] + REPORT, model, folder / name) for name in ("ours", "peer")
    )
    yield _row(
        f"lower {model} for XNNPACK, to bytes",
        *(ours["seconds"], peer["seconds"]),
        goal=5,
        note="peer: ExecuTorch's to_edge_transform_and_lower and to_executorch",
    )
    names = {"delegates": "delegates", "left": "calls left to other kernels"}
    for what, words in names.items():
        yield Row(
            *(PACKAGE, f"{model}: {words}", ours[what], peer[what], ""),
            goal="no more",
            met=ours[what] <= peer[what],
        )
    yield Row(
        *(PACKAGE, f"{model}: size of the file", ours["size"] / 1e6, peer["size"] / 1e6, "MB"),
        goal="no larger",
        met=ours["size"] <= peer["size"],
    )


def _running_rows(model: str, folder: Path) -> Iterator[Row]:
    for name in ("portable", "peer_portable"):
        worker(PRELUDE + _CODES[name] + REPORT, model, folder / name)
    run = {name: worker(RUN, model, folder / name)["seconds"] for name in _CODES}
    case = f"run {model} in the official runtime"
    yield _row(
        *(case, run["ours"], run["peer_portable"]),
        goal=10,
        note="peer: ExecuTorch's own file without a delegate",
    )
    yield Row(
        *(PACKAGE, case, run["ours"], run["portable"]),
        note="peer: our file without a delegate, whose linear layers use the optimized kernel",
    )
    yield Row(
        *(PACKAGE, case, run["ours"], run["peer"]),
        note="peer: ExecuTorch's XNNPACK file",
    )


def _row(case: str, ours: float, peer: float, *, goal: int, note: str) -> Row:
    return Row(
        *(PACKAGE, case, ours, peer),
        goal=f">= {goal}x faster",
        met=peer >= goal * ours,
        note=note,
    )
