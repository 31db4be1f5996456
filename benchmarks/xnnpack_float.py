"""Float32 models through XNNPACK beside ExecuTorch's own lowering, one model at a time.

Prints a row for each model and form: delegates, calls of kernels outside, bytes, time to lower,
and the ratio of times in the official runtime with the bounds of its median. Files are kept in
``out/xnnpack``, the peer's under the hash of what they are made of: they take 10 to 130 s each.
Not part of ``benchmarks/run.py``: it needs torchvision, timm and transformers, and a machine that
does nothing else.

    python -m benchmarks.xnnpack_float [--counts | --forms] [MODEL[:raw|:decomposed]...]

``--counts`` makes our files only, and names what is left outside of them. ``--forms`` compares our
file of the decomposed program with ours of the raw one, a row for each model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.workers import ROOT, worker
from benchmarks.xnnpack_models import NAMES

FORMS = ("raw", "decomposed")
_KEPT = ROOT / "out" / "xnnpack"
_START = """
import collections, hashlib, json, os, sys, time, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
name, form, kept = sys.argv[1], sys.argv[2], Path(sys.argv[3])
stem = kept / f"{name.replace('/', '-')}.{form}"

def told(file, seconds):
    from lowerdeck.serializer import deserialize_pte
    plan = deserialize_pte(file).execution_plan[0]
    made = [step.instr_args for chain in plan.chains for step in chain.instructions]
    calls = [one for one in made if type(one).__name__ == "KernelCall"]
    left = collections.Counter(plan.operators[one.op_index].name for one in calls)
    delegates = sum(type(one).__name__ == "DelegateCall" for one in made)
    return {"seconds": seconds, "delegates": delegates, "left": left, "size": len(file)}
"""
_EXPORT = (
    _START
    + """
from benchmarks.xnnpack_models import build
torch.manual_seed(0)
model, inputs = build(name)
exported = torch.export.export(model, inputs)
if form == "decomposed":
    exported = exported.run_decompositions()
digest = hashlib.sha256(str(exported.graph).encode())
for tensor in (*exported.state_dict.values(), *exported.constants.values()):
    if isinstance(tensor, torch.Tensor):
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
kept.mkdir(parents=True, exist_ok=True)
torch.export.save(exported, f"{stem}.pt2")
torch.save(inputs, f"{stem}.inputs")
Path(f"{stem}.digest").write_text(digest.hexdigest()[:16])
print(json.dumps({}))
"""
)
_OURS = (
    _START
    + """
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
exported = torch.export.load(f"{stem}.pt2")
start = time.process_time()
file = emit(to_backend(exported, XnnpackPartitioner())).to_bytes()
seconds = time.process_time() - start
Path(f"{stem}.ours.pte").write_bytes(file)
print(json.dumps(told(file, seconds)))
"""
)
_PEER = (
    _START
    + """
path = kept / (Path(f"{stem}.digest").read_text() + ".peer.pte")
if not path.exists():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    exported = torch.export.load(f"{stem}.pt2")
    start = time.process_time()
    edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    file = bytes(edge.to_executorch().buffer)
    Path(f"{path}.seconds").write_text(str(time.process_time() - start))
    path.write_bytes(file)
seconds = float(Path(f"{path}.seconds").read_text())
print(json.dumps({**told(path.read_bytes(), seconds), "path": str(path)}))
"""
)
_RUN = """
import importlib, json, sys, time, torch
torch.set_num_threads(1)
binding = importlib.import_module("executorch.extension.pybindings._portable_lib")
inputs = list(torch.load(sys.argv[3]))
modules = [binding._load_for_executorch(path) for path in sys.argv[1:3]]
outputs = [module.run_method("forward", inputs) for module in modules]
apart = max(float((a - b).abs().max()) for a, b in zip(*outputs))
ratios, ours = [], []
while len(ratios) < 40 or (len(ratios) < 400 and sum(ours) < 4):
    spent = []
    for module in modules if len(ratios) % 2 else modules[::-1]:
        start = time.process_time()
        module.run_method("forward", inputs)
        spent.append(time.process_time() - start)
    mine, peer = spent if len(ratios) % 2 else spent[::-1]
    ours.append(mine)
    ratios.append(peer / mine)
ratios.sort()
# The bounds of a median of n pairs, at 95 %: it lies between these two of them.
reach = int(0.98 * len(ratios) ** 0.5)
middle = len(ratios) // 2
print(json.dumps({
    "ratio": ratios[middle],
    "low": ratios[middle - reach],
    "high": ratios[middle + reach],
    "ours": sorted(ours)[middle],
    "apart": apart,
}))
"""


def main(words: list[str]) -> None:
    """Print a table of the models.

    Args:
        words: ``--counts`` or ``--forms``, and names of models; all where there are none.
    """
    chosen = [word for word in words if not word.startswith("--")] or list(NAMES)
    if "--forms" in words:
        print("| model | delegates | left | MB | lower, s | raw, ms | decomposed's time / raw's |")
        print("|---|---|---|---|---|---|---|")
        for name in chosen:
            print(_row_of_forms(name), flush=True)
        return
    print("| model | delegates | left | MB | lower, s | peer's time / ours | ours, ms | apart |")
    print("|---|---|---|---|---|---|---|---|")
    for word in chosen:
        name, _, form = word.partition(":")
        for one in [form] if form else FORMS:
            print(_row(name, one, counts="--counts" in words), flush=True)


def _row_of_forms(name: str) -> str:
    stems = [_stem(name, form) for form in FORMS]
    try:
        raw, torn = (_ours(name, form) for form in FORMS)
        run = worker(_RUN, *(f"{stem}.ours.pte" for stem in stems), f"{stems[0]}.inputs")
    except RuntimeError as error:
        return f"| {name} | {str(error).strip().splitlines()[-1][:120]} ||||||"
    ratio = f"{run['ratio']:.2f} ({run['low']:.2f} to {run['high']:.2f})"
    return f"| {name} | {' | '.join(_cells(raw, torn))} | {run['ours'] * 1e3:.2f} | {ratio} |"


def _stem(name: str, form: str) -> str:
    return str(_KEPT / f"{name.replace('/', '-')}.{form}")


def _ours(name: str, form: str) -> dict[str, Any]:
    """Make our file, and return what is told of it."""
    if not Path(f"{_stem(name, form)}.digest").exists():
        worker(_EXPORT, name, form, _KEPT)
    told: dict[str, Any] = worker(_OURS, name, form, _KEPT)
    return told


def _row(name: str, form: str, *, counts: bool) -> str:
    stem = _stem(name, form)
    arguments = (name, form, _KEPT)
    try:
        ours = _ours(name, form)
        if counts:
            cells = _cells(ours, None)
            return f"| {name} {form} | {' | '.join(cells)} | {dict(ours['left'])} |||"
        peer = worker(_PEER, *arguments)
        run = worker(_RUN, f"{stem}.ours.pte", peer["path"], f"{stem}.inputs")
    except RuntimeError as error:
        return f"| {name} {form} | {str(error).strip().splitlines()[-1][:120]} |||||||"
    ratio = f"{run['ratio']:.2f} ({run['low']:.2f} to {run['high']:.2f})"
    cells = [*_cells(ours, peer), ratio, f"{run['ours'] * 1e3:.2f}", f"{run['apart']:.0e}"]
    return f"| {name} {form} | {' | '.join(cells)} |"


def _cells(ours: dict[str, Any], peer: dict[str, Any] | None) -> list[str]:
    """Return delegates, calls left, megabytes and seconds, the peer's beside ours."""
    rows = [
        (one["delegates"], sum(one["left"].values()), one["size"] / 1e6, one["seconds"])
        for one in (ours, peer)
        if one is not None
    ]
    return [" / ".join(f"{cell:.4g}" for cell in pair) for pair in zip(*rows, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
