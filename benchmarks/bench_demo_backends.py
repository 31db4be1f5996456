"""The XNNPACK backend beside ExecuTorch's: time to lower, delegates, and speed of the files.

Each figure is taken in a process of its own: both projects call their backend ``XnnpackBackend``,
as the runtime does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Row

PACKAGE = "demo_backends"
MODELS = ("mobilenet_v2", "resnet18", "vit")
ROOT = Path(__file__).parents[1]

_PRELUDE = """
import importlib, json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
model, inputs = importlib.import_module("examples." + sys.argv[1]).example()
exported = torch.export.export(model, inputs)
"""
_OURS = """
from lowerdeck.demo_backends import XnnpackPartitioner
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
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
_PEER_PORTABLE = """
from executorch.exir import to_edge
start = time.process_time()
edge = to_edge(exported)
graph = edge.exported_program().graph
file = edge.to_executorch().buffer
seconds = time.process_time() - start
"""
_NATIVE = """
from lowerdeck.demo_backends import InductorPartitioner, InductorRuntime
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
program = to_backend(exported, InductorPartitioner())
runtimes = {"InductorBackend": InductorRuntime(allow_native_code=True)}
method = load(emit(program).to_bytes(), backends=runtimes).method("forward")
method(*inputs)
times = []
for _ in range(10):
    start = time.process_time()
    method(*inputs)
    times.append(time.process_time() - start)
print(json.dumps({"seconds": sorted(times)[5]}))
"""
_REPORT = """
calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
delegates = sum("executorch_call_delegate" in call for call in calls)
left = sum("getitem" not in call for call in calls) - delegates
open(sys.argv[2], "wb").write(file)
print(json.dumps({"seconds": seconds, "delegates": delegates, "left": left, "size": len(file)}))
"""
_RUN = """
import importlib, json, sys, time, torch
torch.set_num_threads(1)
try:
    binding = importlib.import_module("executorch.extension.pybindings._portable_lib")
except ImportError:
    binding = importlib.import_module("executorch.extension.pybindings._C")
_, inputs = importlib.import_module("examples." + sys.argv[1]).example()
data = open(sys.argv[2], "rb").read()
module = binding._load_for_executorch_from_buffer(data)
module.run_method("forward", list(inputs))
times = []
while len(times) < 3 or (sum(times) < 1 and len(times) < 20):
    start = time.process_time()
    module.run_method("forward", list(inputs))
    times.append(time.process_time() - start)
print(json.dumps({"seconds": sorted(times)[len(times) // 2]}))
"""


_CODES = {
    "ours": _OURS,
    "portable": _OURS_PORTABLE,
    "peer": _PEER,
    "peer_portable": _PEER_PORTABLE,
}


def rows(quick: bool) -> Iterator[Row]:
    """Yield time to lower and time to run for each model, beside the peer.

    Args:
        quick: Measure one model only.
    """
    for model in MODELS[:1] if quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            yield from _lowering_rows(model, Path(folder))
            yield from _running_rows(model, Path(folder))
            if not quick:
                yield _native_row(model, Path(folder))


def lowering_rows(model: str) -> list[Row]:
    """Return what lowering one of the examples costs and gives, beside the peer.

    Args:
        model: Name of a module in ``examples``.
    """
    with tempfile.TemporaryDirectory() as folder:
        return list(_lowering_rows(model, Path(folder)))


def _lowering_rows(model: str, folder: Path) -> Iterator[Row]:
    ours, peer = (
        _worker(_PRELUDE + _CODES[name] + _REPORT, model, folder / name)
        for name in ("ours", "peer")
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
        _worker(_PRELUDE + _CODES[name] + _REPORT, model, folder / name)
    run = {name: _worker(_RUN, model, folder / name)["seconds"] for name in _CODES}
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


def _native_row(model: str, folder: Path) -> Row:
    native = _worker(_PRELUDE + _NATIVE, model)["seconds"]
    portable = _worker(_RUN, model, folder / "peer_portable")["seconds"]
    return Row(
        *(PACKAGE, f"run {model} compiled by InductorBackend, in the runner", native, portable),
        note="peer: ExecuTorch's own file without a delegate, in the official runtime",
    )


def _row(case: str, ours: float, peer: float, *, goal: int, note: str) -> Row:
    return Row(
        *(PACKAGE, case, ours, peer),
        goal=f">= {goal}x faster",
        met=peer >= goal * ours,
        note=note,
    )


def _worker(code: str, *args: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"a worker failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
