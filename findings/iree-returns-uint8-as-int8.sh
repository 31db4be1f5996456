#!/usr/bin/env bash
# iree-turbine 3.9.0 with iree-base-compiler 3.13.0, CPU: a result of type uint8 of a program of torch 2.13.0 comes back as an
# array of int8, so that 200 is -56; inside of the program the number is 200. A good engineer would expect the type of the program.
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


x = torch.tensor([1, 200, 255])
for name, function in (("x.to(uint8)", lambda x: x.to(torch.uint8)), ("x.to(uint8).float()", lambda x: x.to(torch.uint8).float())):
    print("torch", name, function(x).tolist(), function(x).dtype)
    got = iree_of(function, x)
    print("iree ", name, got.tolist(), got.dtype)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|iree\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch x.to(uint8) [1, 200, 255] torch.uint8
iree  x.to(uint8) [1, -56, -1] int8
torch x.to(uint8).float() [1.0, 200.0, 255.0] torch.float32
iree  x.to(uint8).float() [1.0, 200.0, 255.0] float32"
echo "$seen"
[ "$seen" = "$expected" ]
