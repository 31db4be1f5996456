"""One step of a comparison of XNNPACK backends, in a separate process.

Both projects call their backend ``XnnpackBackend``, as the runtime does, and a fault of the
runtime ends its process. The programs are saved and loaded, as users' are; the peer's files, which
take 10 to 130 s each, are kept under the hash of what they are made of.

    python -m benchmarks.xnnpack_files STEP MODEL FORM
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from benchmarks.harness import ROOT
from benchmarks.xnnpack_models import Result, build
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.serializer import BackendDelegate, Program, decode_payload, deserialize_pte
from lowerdeck.xnnpack import XnnpackPartitioner

KEPT = ROOT / "out" / "xnnpack"
FLOAT = ("raw", "decomposed")
"""Forms of a program in float32: straight from export, and decomposed by torch."""
SIZES = ("fixed", "varying")
"""Forms with a batch of two: fixed sizes, and every dimension dynamic up to twice its size."""
MODES = ("static", "dynamic", "8da8w", "8da4w", "weights8", "weights4", "fp16")
"""Modes of quantisation and half precision: PT2E's two, torchao's four, and ``model.half()``."""
_ACTIVATIONS, _WEIGHTS = "Int8DynamicActivationIntxWeightConfig", "IntxWeightOnlyConfig"
_GROUP = 32
# ExecuTorch's annotator quantises the positions that index a table there, and the model fails.
_UNANNOTATED = ("transformers/llama_256",)


def stem(model: str, form: str) -> Path:
    """Return the path that the files of a case begin with."""
    return KEPT / f"{model.replace('/', '-')}.{form}"


def export(model: str, form: str) -> dict[str, Any]:
    """Save the program, its inputs and the results that torch computes for it."""
    program, inputs = _program(model, form)
    digest = hashlib.sha256(str(program.graph).encode())
    for tensor in (*program.state_dict.values(), *program.constants.values()):
        for part in _parts(tensor):
            digest.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    at = stem(model, form)
    at.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        # Of the numbers a program reads, it may write some: it is saved before it runs.
        torch.export.save(program, f"{at}.pt2")
        torch.save((inputs, program.module()(*inputs)), f"{at}.io")
    Path(f"{at}.digest").write_text(digest.hexdigest()[:16])
    return {}


def _parts(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors that a constant of a program holds."""
    if not isinstance(tensor, torch.Tensor):
        return []
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [
        part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))
    ]


def _program(name: str, form: str) -> tuple[ExportedProgram, tuple[Any, ...]]:
    quantized = _quantized_models()
    small = "/" not in name
    torch.manual_seed(0)
    model, inputs = quantized.model_and_inputs(name) if small else build(name)
    if form in FLOAT:
        program = torch.export.export(model, inputs)
        return (program if form == "raw" else program.run_decompositions()), inputs
    if form in SIZES:
        doubled = tuple(torch.cat([one, one]) for one in inputs)
        return _of_sizes(model, doubled, is_varying=form == "varying"), doubled
    if form in ("static", "dynamic"):
        options = {"is_per_channel": True, "is_dynamic": form == "dynamic"}
        annotator = "ours" if name in _UNANNOTATED else "peer"
        return quantized.with_pt2e(model, inputs, annotator=annotator, **options), inputs
    if form == "fp16":
        half = tuple(one.half() if one.is_floating_point() else one for one in inputs)
        return torch.export.export(model.half(), half), half
    config = _WEIGHTS if form.startswith("weights") else _ACTIVATIONS
    dtype = torch.int4 if "4" in form else torch.int8
    group = _GROUP if form == "8da4w" and _fits(model, _GROUP) else None
    return quantized.with_torchao(model, inputs, config, group, dtype), inputs


def _of_sizes(
    model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *, is_varying: bool
) -> ExportedProgram:
    if not is_varying:
        return torch.export.export(model, inputs)
    dims: Any = tuple(
        [torch.export.Dim.AUTO(max=2 * size) for size in one.shape] for one in inputs
    )
    shapes = (dims,) if isinstance(model, Result) else dims
    return torch.export.export(model, inputs, dynamic_shapes=shapes)


def _fits(model: torch.nn.Module, group: int) -> bool:
    layers = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    return all(layer.in_features % group == 0 for layer in layers)


def _quantized_models() -> Any:
    """Return the package's own test models, and how their users quantise them."""
    folder = str(ROOT / "packages/xnnpack/tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("quantized_models")


def _load(model: str, form: str) -> ExportedProgram:
    if form in MODES:
        for part in ("torchao", "torchao.quantization", "torchao.quantization.pt2e"):
            importlib.import_module(part)
    return torch.export.load(f"{stem(model, form)}.pt2")


def ours(model: str, form: str) -> dict[str, Any]:
    """Make our file, and return a summary of its content."""
    program = _load(model, form)
    start = time.process_time()
    file = emit(to_backend(program, XnnpackPartitioner())).to_bytes()
    seconds = time.process_time() - start
    path = Path(f"{stem(model, form)}.ours.pte")
    path.write_bytes(file)
    return told_of(path, seconds)


def peer(model: str, form: str) -> dict[str, Any]:
    """Make ExecuTorch's file if it is not kept yet, and return a summary of its content."""
    path = KEPT / (Path(f"{stem(model, form)}.digest").read_text() + ".peer.pte")
    if not path.exists():
        partition = importlib.import_module(
            "executorch.backends.xnnpack.partition.xnnpack_partitioner"
        )
        exir = importlib.import_module("executorch.exir")
        program = _load(model, form)
        start = time.process_time()
        if form.startswith(("8da", "weights")):
            # Its own recipe: torchao's tensor classes come apart, its operators stay.
            program = program.run_decompositions({})
        chosen = [partition.XnnpackPartitioner()]
        edge = exir.to_edge_transform_and_lower(program, partitioner=chosen)
        file = bytes(edge.to_executorch().buffer)
        Path(f"{path}.seconds").write_text(str(time.process_time() - start))
        path.write_bytes(file)
    return told_of(path, float(Path(f"{path}.seconds").read_text()))


def told_of(path: Path, seconds: float) -> dict[str, Any]:
    """Return what is in a file: delegates, calls left to kernels, bytes, nodes of XNNPACK."""
    file = path.read_bytes()
    program = deserialize_pte(file)
    plan = program.execution_plan[0]
    made = [step.instr_args for chain in plan.chains for step in chain.instructions]
    left = Counter(
        plan.operators[one.op_index].name for one in made if type(one).__name__ == "KernelCall"
    )
    return {
        "path": str(path),
        "digest": hashlib.sha256(file).hexdigest()[:16],
        "seconds": seconds,
        "delegates": sum(type(one).__name__ == "DelegateCall" for one in made),
        "left": left,
        "size": len(file),
        "planned": sum(plan.non_const_buffer_sizes),
        "nodes": sorted(node for one in plan.delegates for node in _nodes(program, one)),
    }


def _nodes(program: Program, delegate: BackendDelegate) -> list[str]:
    """Return what each node of a payload computes, so that two payloads can be compared."""
    if delegate.id != "XnnpackBackend":
        return []
    graph = decode_payload(program.backend_delegate_data[delegate.processed.index].data)
    values = {value.id: value for value in graph.values}
    return [
        f"{node.operator.label} {[(values[i].dtype.name, values[i].shape) for i in node.inputs]}"
        for node in graph.nodes
    ]


def run(mine: str, theirs: str, io: str, other_io: str = "") -> dict[str, Any]:
    """Run two files in turn in the official runtime, on one thread."""
    binding = importlib.import_module("executorch.extension.pybindings._portable_lib")
    calls, errors = [], []
    for path, pair in ((mine, io), (theirs, other_io or io)):
        if not path:
            continue
        inputs, expected = torch.load(pair)
        module = binding._load_for_executorch(path)
        calls.append(functools.partial(module.run_method, "forward", list(inputs)))
        # A result may lie in the memory of the module, which the next call takes again.
        found, wanted = calls[-1]()[0].float(), expected.float()
        errors.append(float((found - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0))
    ratios: list[float] = []
    spent: list[list[float]] = [[] for _ in calls]
    while len(ratios) < 40 or (len(ratios) < 400 and sum(spent[0]) < 4):
        # Who runs first changes each time: it may find the caches warm.
        order = range(len(calls)) if len(ratios) % 2 else reversed(range(len(calls)))
        for number in order:
            start = time.process_time()
            calls[number]()
            spent[number].append(time.process_time() - start)
        ratios.append(spent[-1][-1] / spent[0][-1])
    ratios.sort()
    # The bounds of a median of n pairs, at 95 %: it lies between these two of them.
    middle, reach = len(ratios) // 2, int(0.98 * len(ratios) ** 0.5)
    return {
        "ratio": ratios[middle],
        "low": ratios[middle - reach],
        "high": ratios[middle + reach],
        "ours": sorted(spent[0])[middle],
        "errors": errors,
    }


_STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "export": export,
    "ours": ours,
    "peer": peer,
    "run": run,
}


def main(steps: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Do the step that the command line names; the last line of the output is what came of it."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        outcome = steps[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(_STEPS)
