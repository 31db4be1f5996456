"""Quantised and half-precision models through XNNPACK beside ExecuTorch's own lowering.

Prints a row for each model and mode: delegates, calls left outside, bytes and time, ours and the
peer's. Not part of ``benchmarks/run.py``: it needs torchao, and its times are a hint only unless
the machine does nothing else.

    python -m benchmarks.xnnpack_quantized [MODEL:MODE...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.workers import worker

MODELS = ("cnn", "mlp", "decoder", "mobilenet")
MODES = ("static", "dynamic", "8da4w", "8da8w", "fp16")
_MAKE = """
import sys, time, json, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, "packages/xnnpack/tests")
import torch
torch.set_num_threads(1)
from quantized_models import model_and_inputs, with_pt2e, with_torchao
name, mode = sys.argv[1].split(":")
model, inputs = model_and_inputs(name)
config = "Int8DynamicActivationIntxWeightConfig"
if mode == "static":
    exported = with_pt2e(model, inputs, is_per_channel=True)
elif mode == "dynamic":
    exported = with_pt2e(model, inputs, is_per_channel=True, is_dynamic=True)
elif mode == "8da4w":
    exported = with_torchao(model, inputs, config, None if name == "mobilenet" else 32, torch.int4)
elif mode == "8da8w":
    exported = with_torchao(model, inputs, config, None, torch.int8)
else:
    inputs = tuple(one.half() for one in inputs)
    exported = torch.export.export(model.half(), inputs)
torch.save(inputs, sys.argv[3])
start = time.process_time()
"""
_OURS = """
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
program = to_backend(exported, XnnpackPartitioner())
graph, file = program.graph, emit(program).to_bytes()
"""
_PEER = """
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
if mode.startswith("8da"):
    exported = exported.run_decompositions({})
edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
graph = edge.exported_program().graph
file = edge.to_executorch().buffer
"""
_REPORT = """
seconds = time.process_time() - start
calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
delegates = sum("executorch_call_delegate" in call for call in calls)
left = sum("getitem" not in call for call in calls) - delegates
open(sys.argv[2], "wb").write(file)
print(json.dumps({"seconds": seconds, "delegates": delegates, "left": left, "size": len(file)}))
"""
_RUN = """
import importlib, json, sys, time, torch
torch.set_num_threads(1)
binding = importlib.import_module("executorch.extension.pybindings._portable_lib")
inputs = list(torch.load(sys.argv[3]))
modules = [binding._load_for_executorch(path) for path in sys.argv[1:3]]
times = [[], []]
for _ in range(60):
    for module, spent in zip(modules, times):
        start = time.process_time()
        module.run_method("forward", inputs)
        spent.append(time.process_time() - start)
print(json.dumps({"ours": sorted(times[0])[30], "peer": sorted(times[1])[30]}))
"""


def main(chosen: list[str]) -> None:
    """Print a table of the cases.

    Args:
        chosen: Names such as ``cnn:static``; all where there are none.
    """
    print("| case | delegates | left outside | kB | time to lower | time to run |")
    print("|---|---|---|---|---|---|")
    for case in chosen or [f"{model}:{mode}" for model in MODELS for mode in MODES]:
        with tempfile.TemporaryDirectory() as folder:
            print(_row(case, Path(folder)), flush=True)


def _row(case: str, folder: Path) -> str:
    inputs = folder / "inputs.pt"
    ours = worker(_MAKE + _OURS + _REPORT, case, folder / "ours.pte", inputs)
    try:
        peer = worker(_MAKE + _PEER + _REPORT, case, folder / "peer.pte", inputs)
        run = worker(_RUN, folder / "ours.pte", folder / "peer.pte", inputs)
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        return f"| {case} | {ours['delegates']} | {ours['left']} | the peer fails: {last[:90]} |||"
    cells = [
        f"{ours['delegates']} / {peer['delegates']}",
        f"{ours['left']} / {peer['left']}",
        f"{ours['size'] / 1e3:.1f} / {peer['size'] / 1e3:.1f}",
        f"{ours['seconds']:.2f} s, {peer['seconds'] / ours['seconds']:.0f}x faster",
        f"{run['ours'] * 1e6:.0f} us, {run['peer'] / run['ours']:.2f}x faster",
    ]
    return f"| {case} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
