#!/usr/bin/env bash
# executorch 1.4.1: `torch.add(a, b, alpha=0.5)` is a + 0.5 b. If `a` has one element and `b` several, the kernel of
# `aten::add` exchanges the operands and returns b + 0.5 a: 10 + 0.5 [1, 2, 3] is [6, 7, 8] in a file instead of
# [10.5, 11, 11.5]. No error is raised. `sub` with the same operands is right.
# A good engineer would expect that alpha belongs to the second operand whatever the sizes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "ruamel.yaml==0.18.16" "flatbuffers==25.12.19" "tabulate==0.9.0" "pyyaml==6.0.3" "pandas==2.3.3"
"$pip" install --quiet --no-deps "executorch==1.4.1" "torchao==0.18.0"
cat > "$folder/seen.py" <<'PYTHON'
import torch
from executorch.exir import to_edge
from executorch.extension.pybindings import _portable_lib


def on_device(function, *inputs):
    model = torch.nn.Module()
    model.forward = function
    program = torch.export.export(model.eval(), inputs)
    file = to_edge(program).to_executorch().buffer
    return _portable_lib._load_for_executorch_from_buffer(file).forward(inputs)[0]


one, many = torch.tensor([10.0]), torch.tensor([1.0, 2.0, 3.0])
add = lambda a, b: torch.add(a, b, alpha=0.5)
print("torch, one first:", add(one, many).tolist())
print("file, one first:", on_device(add, one, many).tolist())
print("file, one second:", on_device(add, many, one).tolist())
print("file, sub, one first:", on_device(lambda a, b: torch.sub(a, b, alpha=0.5), one, many).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file,\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch, one first: [10.5, 11.0, 11.5]
file, one first: [6.0, 7.0, 8.0]
file, one second: [6.0, 7.0, 8.0]
file, sub, one first: [9.5, 9.0, 8.5]"
echo "$seen"
[ "$seen" = "$expected" ]
