#!/usr/bin/env bash
# executorch 1.4.1: `x % 3` of integers, exported with executorch.exir and run by the portable kernel of `aten::remainder`,
# has the sign of the dividend, as C's operator has: -7 % 3 is -1. torch and Python give 2. Floating numbers are right.
# No error, no warning; indices that wrap around (`(position - 1) % length`) become negative.
# A good engineer would expect the kernel of an operator to follow its definition for each dtype.
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


x = torch.tensor([-7, 7, -1])
print("torch:", (x % 3).tolist())
print("file, integers:", on_device(lambda x: x % 3, x).tolist())
print("file, floats:", on_device(lambda x: x % 3, x.float()).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file,\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: [2, 1, 2]
file, integers: [-1, 1, -1]
file, floats: [2.0, 1.0, 2.0]"
echo "$seen"
[ "$seen" = "$expected" ]
