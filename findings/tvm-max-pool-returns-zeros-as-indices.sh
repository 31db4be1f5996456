#!/usr/bin/env bash
# apache-tvm 0.27.0.post1, CPU: `F.max_pool2d(x, 2, return_indices=True)` of a torch.export program (torch 2.13.0) gives the right
# maxima, and float zeros as their indices, without a warning. A good engineer would expect indices or an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "apache-tvm==0.27.0.post1" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import torch
import torch.nn.functional as F
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def show(name, function, x):
    program = torch.export.export(Model(function), (x,))
    machine = relax.VirtualMachine(tvm.compile(from_exported_program(program), target="llvm"), tvm.cpu())
    print("torch", name, function(x).tolist())
    print("tvm  ", name, machine["main"](tvm.runtime.tensor(x.numpy()))[0].numpy().tolist())


image = torch.arange(16.0).reshape(1, 1, 4, 4)
show("maxima", lambda x: F.max_pool2d(x, 2, return_indices=True)[0].flatten(), image)
show("indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[1].flatten(), image)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|tvm\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch maxima [5.0, 7.0, 13.0, 15.0]
tvm   maxima [5.0, 7.0, 13.0, 15.0]
torch indices [5, 7, 13, 15]
tvm   indices [0.0, 0.0, 0.0, 0.0]"
echo "$seen"
[ "$seen" = "$expected" ]
