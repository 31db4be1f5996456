#!/usr/bin/env bash
# executorch 1.4.1: `x.sum(0)` of float64 has a float64 result, but the portable kernel adds in float32: a million times
# 0.1 is 99910.3. Over two dimensions (`x.sum((0, 1))`) another path of the same kernel adds in float64 and is right.
# A good engineer would expect at least the precision of the dtype that goes in and comes out.
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


x = torch.full((1000000, 1), 0.1, dtype=torch.float64)
print("torch:", round(float(x.sum(0)), 4))
print("file, one dimension:", round(float(on_device(lambda x: x.sum(0), x)), 1))
print("file, two dimensions:", round(float(on_device(lambda x: x.sum((0, 1)), x)), 4))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file,\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: 100000.0
file, one dimension: 99910.3
file, two dimensions: 100000.0"
echo "$seen"
[ "$seen" = "$expected" ]
