#!/usr/bin/env bash
# apache-tvm 0.27.0.post1, CPU: the importer of torch.export programs (torch 2.13.0) leaves out the alpha of `torch.add`, `sub` and
# `rsub` and divisor_override of average pools, without a warning. The alpha of `addmm` is honoured.
# A good engineer would expect an error for an argument that is not supported.
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


x = torch.tensor([1.0, 2, 3])
image = torch.arange(16.0).reshape(1, 1, 4, 4)
show("add, alpha=3", lambda x: torch.add(x, x, alpha=3), x)
show("rsub, alpha=3", lambda x: torch.rsub(x, x, alpha=3), x)
show("divisor_override=1", lambda x: F.avg_pool2d(x, 2, divisor_override=1).flatten(), image)
show("addmm, alpha=3", lambda x: torch.addmm(x, x, x, alpha=3).flatten(), torch.ones(2, 2))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|tvm\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch add, alpha=3 [4.0, 8.0, 12.0]
tvm   add, alpha=3 [2.0, 4.0, 6.0]
torch rsub, alpha=3 [-2.0, -4.0, -6.0]
tvm   rsub, alpha=3 [0.0, 0.0, 0.0]
torch divisor_override=1 [10.0, 18.0, 42.0, 50.0]
tvm   divisor_override=1 [2.5, 4.5, 10.5, 12.5]
torch addmm, alpha=3 [7.0, 7.0, 7.0, 7.0]
tvm   addmm, alpha=3 [7.0, 7.0, 7.0, 7.0]"
echo "$seen"
[ "$seen" = "$expected" ]
