#!/usr/bin/env bash
# apache-tvm 0.27.0.post1, CPU: `F.interpolate(x, size=...)` with the default mode "nearest" of a torch.export program (torch 2.13.0)
# takes other columns than torch for some sizes (4 to 7), and the same for other sizes (4 to 2, 4 to 8), where most models test it.
# A good engineer would expect one rule: torch takes the column floor(i * 4 / 7).
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


row = torch.arange(4.0).reshape(1, 1, 1, 4)
for size in (7, 2, 8):
    show(f"4 to {size}", lambda x: F.interpolate(x, size=(1, size)).flatten(), row)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|tvm\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch 4 to 7 [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0]
tvm   4 to 7 [0.0, 0.0, 1.0, 2.0, 2.0, 3.0, 3.0]
torch 4 to 2 [0.0, 2.0]
tvm   4 to 2 [0.0, 2.0]
torch 4 to 8 [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
tvm   4 to 8 [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]"
echo "$seen"
[ "$seen" = "$expected" ]
