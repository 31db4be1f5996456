#!/usr/bin/env bash
# iree-turbine 3.9.0 with iree-base-compiler 3.13.0, CPU: `torch.maximum(a, b)` and `minimum` of torch 2.13.0 are NaN if b is NaN,
# and b if only a is NaN. `clamp` returns its lower limit for NaN, relu6 returns 6, and relu keeps NaN.
# A good engineer would expect one treatment of NaN, and a maximum that does not depend on the order of its arguments.
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


nan = float("nan")
a, b = torch.tensor([1, nan]), torch.tensor([nan, 1])
print("torch maximum", torch.maximum(a, b).tolist())
print("iree  maximum", iree_of(torch.maximum, a, b).tolist())
print("iree  minimum", iree_of(torch.minimum, a, b).tolist())
for name, function in (("relu", torch.relu), ("relu6", torch.nn.functional.relu6), ("clamp", lambda x: x.clamp(-2, 2))):
    print("torch", name, function(a).tolist())
    print("iree ", name, iree_of(function, a).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|iree\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch maximum [nan, nan]
iree  maximum [nan, 1.0]
iree  minimum [nan, 1.0]
torch relu [1.0, nan]
iree  relu [1.0, nan]
torch relu6 [1.0, nan]
iree  relu6 [1.0, 6.0]
torch clamp [1.0, nan]
iree  clamp [1.0, -2.0]"
echo "$seen"
[ "$seen" = "$expected" ]
