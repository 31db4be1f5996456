#!/usr/bin/env bash
# iree-turbine 3.9.0 with iree-base-compiler 3.13.0, CPU: the compiler lowers float64 to float32, also in the signature of a
# program of torch 2.13.0 that takes float64. The call accepts a float64 array all the same and reads its bytes as float32:
# [1, 2, 3].float() is [0, 1.875, 0]. A good engineer would expect a conversion, or an error about the type of the argument.
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


x = torch.tensor([1.0, 2, 3], dtype=torch.float64)
print("torch", x.float().tolist())
print("iree ", iree_of(lambda x: x.float(), x).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|iree\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch [1.0, 2.0, 3.0]
iree  [0.0, 1.875, 0.0]"
echo "$seen"
[ "$seen" = "$expected" ]
