"""Programs read from files: every write to the unflattened module works, and only there.

Memory that torch read or mapped has no allocator, so that a lazy copy of it crashes the process at
the first write. Each program is written in another process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_WRITES = {
    "optimizer": "step(module)",
    "in place": "[p.add_(1) for p in params]",
    "data": "[p.data.copy_(torch.ones_like(p)) for p in params]",
    "element": "[p.view(-1)[0].fill_(7) for p in params]",
    "load_state_dict": "module.load_state_dict({k: v + 1 for k, v in before.items()})",
    "assign": "module.load_state_dict({k: v + 1 for k, v in before.items()}, assign=True)",
    "to": "module.to(torch.float64)",
    "half": "module.half().float(); [p.add_(1) for p in module.parameters()]",
    "set": "[p.set_(torch.ones_like(p)) for p in params]",
    "fill from numpy": "[p.detach().numpy().fill(3) for p in params]",
    "buffer": "module.counts.zero_()",
    "forward writes a buffer": "module(torch.ones(1, 4))",
    "share_memory": "module.share_memory(); [p.add_(1) for p in module.parameters()]",
}

_LOADS = {
    "exported": "program = exported",
    "load": "save(exported, path); program = load(path)",
    "load of bytes": "save(exported, path); program = load(io.BytesIO(open(path, 'rb').read()))",
    "assigned": "torch.save(model.state_dict(), path);"
    "model.load_state_dict(torch.load(path), assign=True); program = export(model, x)",
    "mapped": "torch.save(model.state_dict(), path);"
    "model.load_state_dict(torch.load(path, mmap=True), assign=True); program = export(model, x)",
    "parts of one storage": "one = torch.zeros(4096);"
    "model.load_state_dict(placed(model, one), assign=True); program = export(model, x)",
    "parts of one buffer": "one = torch.frombuffer(bytearray(4 * 4096), dtype=torch.float32);"
    "model.load_state_dict(placed(model, one), assign=True); program = export(model, x)",
    "shared": "model.share_memory(); program = export(model, x)",
}

_PROGRAM = """
import io, json, sys
import torch
from torch import nn
from torch.export import export, load, save
from lowerdeck.unflatten import unflatten

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("counts", torch.ones(3))

    def forward(self, x):
        self.counts.add_(1)
        return self.two(self.one(x)) * self.counts.sum()

def placed(model, one):
    found, start = {}, 0
    for name, value in model.state_dict().items():
        if name == "two.weight":
            found[name] = found["one.weight"]
            continue
        part = one[start : start + value.numel()].view(value.shape)
        part.copy_(value)
        found[name] = part
        start += value.numel() + 16
    return found

def step(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.enable_grad():
        module(torch.ones(1, 4)).sum().backward()
    optimizer.step()

def storages(tensors):
    return {value.untyped_storage().data_ptr() for value in tensors}

path, load_it, writes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
x = (torch.ones(1, 4),)
wrong = []
torch.manual_seed(0)
model = Model()
exported = export(model, x)
exec(load_it)
for name, write in writes.items():
    before = {key: value.clone() for key, value in program.state_dict.items()}
    module = unflatten(program)
    assert module.two.weight is module.one.weight, "the tie is lost"
    started = {key: value.clone() for key, value in module.state_dict().items()}
    if any(not torch.equal(started[key], before[key]) for key in before):
        wrong.append(f"{name}: copies differ")
    params = list(module.parameters())
    # The tied weight, two biases and the buffer; parts of one storage may be copied together.
    if len(storages(module.state_dict().values())) > 4:
        wrong.append(f"{name}: {len(storages(module.state_dict().values()))} storages")
    with torch.no_grad():
        exec(write)
    for key, value in program.state_dict.items():
        if not torch.equal(value, before[key]):
            wrong.append(f"{name}: the program's {key} was written")
    after = module.state_dict()
    if write != "module.to(torch.float64)":
        if all(torch.equal(after[key], started[key]) for key in started):
            wrong.append(f"{name}: nothing was written")
    if "assign" not in name and module.two.weight is not module.one.weight:
        wrong.append(f"{name}: the tie is lost")
print(json.dumps(wrong))
"""


@pytest.mark.parametrize("load", _LOADS.values(), ids=_LOADS)
def test_every_write_works_and_leaves_the_program_alone(load: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "file.pt2"), load, json.dumps(_WRITES)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == []
