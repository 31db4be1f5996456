#!/usr/bin/env bash
# apache-tvm 0.27.0.post1, CPU: a float16 `mean` or `var` of a torch.export program (torch 2.13.0) adds up in float16: the mean of
# 4,096 numbers of 100 is infinite, as their sum exceeds 65,504. torch accumulates in float32 and gives 100, also within a program.
# A good engineer would expect a mean between the smallest and the largest number.
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


halves = torch.full((4096,), 100.0, dtype=torch.float16)
show("mean", lambda x: x.mean(), halves)
show("var", lambda x: x.var(), halves)
show("float mean", lambda x: x.float().mean(), halves)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|tvm\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch mean 100.0
tvm   mean inf
torch var 0.0
tvm   var inf
torch float mean 100.0
tvm   float mean 100.0"
echo "$seen"
[ "$seen" = "$expected" ]
