#!/usr/bin/env bash
# iree-turbine 3.9.0 with iree-base-compiler 3.13.0, CPU: `F.pad(x, (-1, 1))` of torch 2.13.0, which drops the first element
# and appends a zero, and `F.pad(x, (1, -1))` both return x unchanged: the result has the size of x, and the
# amounts are ignored. `F.pad(x, (-1, 2))` is refused. A good engineer would expect an error or shifted elements, as in torch.
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


x = torch.tensor([[1.0, 2, 3, 4]])
for amounts in ((-1, 1), (1, -1)):
    print("torch", amounts, torch.nn.functional.pad(x, amounts).tolist())
    print("iree ", amounts, iree_of(lambda x: torch.nn.functional.pad(x, amounts), x).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(torch\|iree\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch (-1, 1) [[2.0, 3.0, 4.0, 0.0]]
iree  (-1, 1) [[1.0, 2.0, 3.0, 4.0]]
torch (1, -1) [[0.0, 1.0, 2.0, 3.0]]
iree  (1, -1) [[1.0, 2.0, 3.0, 4.0]]"
echo "$seen"
[ "$seen" = "$expected" ]
