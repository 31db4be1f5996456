#!/usr/bin/env bash
# apache-tvm 0.27.0.post1, CPU: `x / 3` of an integer tensor of a torch.export program (torch 2.13.0) is an integer division, as are
# `x / 3.0` and `x / y`: the result has an integer type and no fraction. A good engineer would expect true division: the program
# records a result of float32.
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


x = torch.tensor([1, 2, 7])
show("x / 3", lambda x: x / 3, x)
show("x / 3.0", lambda x: x / 3.0, x)
show("x / x.flip(0)", lambda x: x / x.flip(0), x)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|tvm\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch x / 3 [0.3333333432674408, 0.6666666865348816, 2.3333332538604736]
tvm   x / 3 [0, 0, 2]
torch x / 3.0 [0.3333333432674408, 0.6666666865348816, 2.3333332538604736]
tvm   x / 3.0 [0, 0, 2]
torch x / x.flip(0) [0.1428571492433548, 1.0, 7.0]
tvm   x / x.flip(0) [0, 1, 7]"
echo "$seen"
[ "$seen" = "$expected" ]
