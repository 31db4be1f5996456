"""One step of a comparison of OpenVINO's ways into the official runtime, in a separate process.

Both projects call their backend ``OpenvinoBackend``, as the runtime does. A program is saved once,
and every file is made of it.

    python -m benchmarks.openvino_files STEP MODEL
"""

from __future__ import annotations

import importlib
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import xnnpack_files
from benchmarks.xnnpack_files import FLOAT, main, stem, told_of
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.openvino import OpenvinoPartitioner
from lowerdeck.torch_base import pytree
from lowerdeck.xnnpack import XnnpackPartitioner

FILES = ("ours", "xnnpack", "free", "peer")
"""Ours of OpenVINO, of XNNPACK, and where the device chooses the precision; ExecuTorch's."""
_EXACT = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
_ROUNDS, _SECONDS = 30, 30.0


def path_of(model: str, suffix: str) -> Path:
    """Return where a file of a model is stored."""
    return Path(f"{stem(model, FLOAT[0])}.{suffix}")


def peer(model: str) -> dict[str, Any]:
    """Make ExecuTorch's own file of OpenVINO."""
    # The package's door imports its quantiser, which needs nncf and more; none of it is used here.
    door = "executorch.backends.openvino.quantizer"
    for name in (door, f"{door}.quantizer"):
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name])["OpenVINOQuantizer"] = None
    exir = importlib.import_module("executorch.exir")
    specs = importlib.import_module("executorch.exir.backend.compile_spec_schema")
    partition = importlib.import_module("executorch.backends.openvino.partitioner")
    program = torch.export.load(str(path_of(model, "pt2")))
    start = time.process_time()
    chosen = partition.OpenvinoPartitioner([specs.CompileSpec("device", b"CPU")])
    edge = exir.to_edge_transform_and_lower(program, partitioner=[chosen])
    file = bytes(edge.to_executorch().buffer)
    return _kept(model, "peer", file, time.process_time() - start)


def _lowered(name: str, model: str) -> dict[str, Any]:
    partitioner = _OURS[name]()
    program = torch.export.load(str(path_of(model, "pt2")))
    start = time.process_time()
    file = emit(to_backend(program, partitioner)).to_bytes()
    return _kept(model, name, file, time.process_time() - start)


_OURS: dict[str, Callable[[], Any]] = {
    "ours": OpenvinoPartitioner,
    "xnnpack": XnnpackPartitioner,
    "free": partial(OpenvinoPartitioner, keep_precision=False),
}


def _kept(model: str, name: str, file: bytes, seconds: float) -> dict[str, Any]:
    path_of(model, f"{name}.pte").write_bytes(file)
    return told_of(path_of(model, f"{name}.pte"), seconds)


def run(model: str, *names: str) -> dict[str, Any]:
    """Run files in turn in the official runtime, and the program in OpenVINO without it.

    Returns:
        For each name, and ``"direct"``: the median of the milliseconds of a call, and the largest
        error relative to the largest result; ``"ratios"``: of each to the first one, call by call.
    """
    inputs, expected = torch.load(path_of(model, "io"))
    # Its door tells the runtime where OpenVINO's library lies.
    binding = importlib.import_module("executorch.extension.pybindings.portable_lib")
    calls: dict[str, Callable[[], Any]] = {}
    for name in names:
        module = vars(binding)["_load_for_executorch"](str(path_of(model, f"{name}.pte")))
        calls[name] = lambda module=module: module.forward(list(inputs))
    calls["direct"] = _direct(model, inputs)
    wanted = pytree.tree_leaves(expected)
    found: dict[str, Any] = {name: {"error": _error(calls[name](), wanted)} for name in calls}
    spent: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    while len(spent["direct"]) < _ROUNDS or (
        len(spent["direct"]) < 10 * _ROUNDS and time.perf_counter() - start < _SECONDS / 6
    ):
        # Who runs first changes each time: it may find the caches warm.
        order = list(calls) if len(spent["direct"]) % 2 else list(reversed(calls))
        for name in order:
            begin = time.perf_counter()
            calls[name]()
            spent[name].append(time.perf_counter() - begin)
    for name, times in spent.items():
        found[name]["ms"] = 1e3 * sorted(times)[len(times) // 2]
        ratios = sorted(a / b for a, b in zip(times, spent[names[0]], strict=True))
        found[name]["ratio"] = ratios[len(ratios) // 2]
    return found


def _direct(model: str, inputs: tuple[torch.Tensor, ...]) -> Callable[[], list[torch.Tensor]]:
    """Return a call of the program as OpenVINO's own frontend reads it, in float32."""
    openvino = importlib.import_module("openvino")
    program = torch.export.load(str(path_of(model, "pt2")))
    compiled = openvino.Core().compile_model(openvino.convert_model(program), "CPU", _EXACT)
    request = compiled.create_infer_request()
    arrays = [one.numpy() for one in inputs]

    def call() -> list[torch.Tensor]:
        request.infer(arrays, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(one.data) for one in request.output_tensors]

    return call


def _error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest number that was expected."""
    largest = max(float(one.abs().max()) for one in wanted) or 1.0
    pairs = zip(found, wanted, strict=True)
    return max(float((one.float() - other.float()).abs().max()) for one, other in pairs) / largest


_STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "export": partial(xnnpack_files.export, form=FLOAT[0]),
    **{name: partial(_lowered, name) for name in _OURS},
    "peer": peer,
    "run": run,
}

if __name__ == "__main__":
    main(_STEPS)
