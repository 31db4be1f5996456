"""Our XNNPACK backend and ExecuTorch's of that name in one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.heavy,  # three processes that import ExecuTorch and lower a dozen times
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

_SCRIPT = """
import io, json, sys, torch
def peer():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    return XnnpackPartitioner
def ours():
    from lowerdeck.xnnpack import XnnpackPartitioner
    return XnnpackPartitioner
order, folder = sys.argv[1:]
known = {}
for name in order.split():
    known[name] = {"ours": ours, "peer": peer}[name]()
from executorch import exir
from executorch.exir import EdgeProgramManager, to_edge, to_edge_transform_and_lower
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
torch.manual_seed(0)
Seq, nn = torch.nn.Sequential, torch.nn
model = Seq(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.GELU()).eval()
x = (torch.randn(1, 3, 4, 4),)
def program():
    return torch.export.export(model, x)
def ways(name, partitioner):
    yield "here", lambda: EdgeProgramManager(
        to_backend(to_edge(program()).exported_program(), partitioner())
    ).to_executorch().buffer
    if name == "ours":
        return
    yield "edge", lambda: to_edge(program()).to_backend(partitioner()).to_executorch().buffer
    yield "transform", lambda: to_edge_transform_and_lower(
        program(), partitioner=[partitioner()]
    ).to_executorch().buffer
    edge = to_edge_transform_and_lower(program(), partitioner=[partitioner()])
    yield "saved", lambda: EdgeProgramManager(loaded(edge.exported_program())
    ).to_executorch().buffer
def loaded(edge):
    held = io.BytesIO()
    exir.save(edge, held)
    held.seek(0)
    return exir.load(held)
files = {}
for turn in (1, 2):
    for name, partitioner in known.items():
        for way, make in ways(name, partitioner):
            files[f"{name} {way} {turn}"] = bytes(make())
if "ours" in known:
    files["ours alone 1"] = emit(to_backend(program(), known["ours"]())).to_bytes()
for name, data in files.items():
    open(f"{folder}/{name}", "wb").write(data)
torch.save((x, model(*x).detach()), f"{folder}/wanted")
print(json.dumps(sorted(files)))
"""


def made(order: str, folder) -> dict[str, bytes]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, order, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = json.loads(done.stdout.splitlines()[-1])
    return {name: (folder / name).read_bytes() for name in names}


def test_our_lowering_takes_each_backend_whichever_was_imported_first(tmp_path):
    import torch

    from lowerdeck.serializer import decode_payload, deserialize_pte

    alone = made("peer", tmp_path / "alone")
    for order in ("ours peer", "peer ours"):
        files = made(order, tmp_path / order)
        # ExecuTorch's backend makes the bytes that it makes without us.
        assert {name: data for name, data in files.items() if name in alone} == alone
        x, wanted = torch.load(tmp_path / order / "wanted")
        for name in files:
            if not name.startswith("ours"):
                continue
            outcome = official.run(tmp_path / order / name, [official.Call(x)])
            assert isinstance(outcome, official.Ran), (name, outcome)
            torch.testing.assert_close(outcome.outputs[0][0], wanted, rtol=0, atol=1e-5)
            content = deserialize_pte(files[name])
            (plan,) = content.execution_plan
            assert [one.id for one in plan.delegates] == ["XnnpackBackend"], name
            assert not plan.operators, name
            (blob,) = content.backend_delegate_data
            assert decode_payload(bytes(memoryview(blob.data))).nodes
