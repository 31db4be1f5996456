#!/usr/bin/env bash
# executorch 1.4.1: `x ** 3` of int64 is computed in float64 by the portable kernel of `aten::pow`. Above 2^53 results are
# rounded, and what int64 cannot hold becomes its smallest number instead of wrapping around as in torch.
# `x * x * x` is computed in integers and equals torch, so that rewriting a power as products changes results.
# A good engineer would expect integer arithmetic for integer tensors and an integer exponent.
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


x = torch.tensor([208065, 3000001])
print("torch:", (x**3).tolist())
print("file, power:", on_device(lambda x: x**3, x).tolist())
print("file, products:", on_device(lambda x: x * x * x, x).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file,\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: [9007351116674625, 8553282926299448385]
file, power: [9007351116674624, -9223372036854775808]
file, products: [9007351116674625, 8553282926299448385]"
echo "$seen"
[ "$seen" = "$expected" ]
