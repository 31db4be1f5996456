#!/usr/bin/env bash
# iree-turbine 3.9.0 with iree-base-compiler 3.13.0, CPU: a Python number in a program of torch 2.13.0 is cut to float32, not
# rounded: `x * (1 / 3)` multiplies by 0.33333331 instead of 0.33333334, and 3 * (1 / 3) becomes 0.99999994, whose integer part is 0.
# Resizing with "nearest-exact" from 4 to 6 columns takes other columns for that reason. A tensor constant of 1/3 is right.
# A good engineer would expect a number to become the nearest float32, as a cast does everywhere else.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "iree-turbine==3.9.0" "iree-base-compiler==3.13.0" "iree-base-runtime==3.13.0" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import iree.runtime
import iree.turbine.aot
import torch


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def iree_of(function, *inputs):
    program = torch.export.export(Model(function), inputs)
    compiled = iree.turbine.aot.export(program).compile(save_to=None, target_backends=["llvm-cpu"])
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-task"))
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, compiled.map_memory()))
    return context.modules.module["main"](*[x.numpy() for x in inputs]).to_host()


third = torch.tensor(1 / 3)
x = torch.tensor([1.0, 3, 6])
for name, function in (
    ("x * (1 / 3)", lambda x: x * (1 / 3)),
    ("its integers", lambda x: (x * (1 / 3)).long()),
    ("x * constant", lambda x, third: x * third),
):
    inputs = (x, third) if "constant" in name else (x,)
    print("torch", name, function(*inputs).tolist())
    print("iree ", name, iree_of(function, *inputs).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|iree\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch x * (1 / 3) [0.3333333432674408, 1.0, 2.0]
iree  x * (1 / 3) [0.3333333134651184, 0.9999999403953552, 1.9999998807907104]
torch its integers [0, 1, 2]
iree  its integers [0, 0, 1]
torch x * constant [0.3333333432674408, 1.0, 2.0]
iree  x * constant [0.3333333432674408, 1.0, 2.0]"
echo "$seen"
[ "$seen" = "$expected" ]
