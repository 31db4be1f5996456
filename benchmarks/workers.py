"""Code that benchmarks of backends run in processes of their own, for models in ``examples``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import compiled_environment

MODELS = ("mobilenet_v2", "resnet18", "vit")
ROOT = Path(__file__).parents[1]

PRELUDE = """
import importlib, json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
model, inputs = importlib.import_module("examples." + sys.argv[1]).example()
exported = torch.export.export(model, inputs)
"""
"""Starts the code of a worker: the model of its first argument, exported."""
PEER_PORTABLE = """
from executorch.exir import to_edge
start = time.process_time()
edge = to_edge(exported)
graph = edge.exported_program().graph
file = edge.to_executorch().buffer
seconds = time.process_time() - start
"""
"""ExecuTorch's own file without a delegate."""
REPORT = """
calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
delegates = sum("executorch_call_delegate" in call for call in calls)
left = sum("getitem" not in call for call in calls) - delegates
open(sys.argv[2], "wb").write(file)
print(json.dumps({"seconds": seconds, "delegates": delegates, "left": left, "size": len(file)}))
"""
"""Ends the code of a worker that makes a file: writes it to the second argument."""
RUN = """
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
"""The whole code of a worker: how long the official runtime takes for a file."""


def worker(code: str, *args: object) -> dict[str, Any]:
    """Run code in a process of its own and return what its last line tells.

    Args:
        code: The code.
        args: Its arguments.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        env=compiled_environment(),
    )
    if done.returncode:
        raise RuntimeError(f"a worker failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
