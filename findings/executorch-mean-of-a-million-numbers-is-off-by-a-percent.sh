#!/usr/bin/env bash
# executorch 1.4.1: a float32 mean over several dimensions (`x.mean((0, 1))`) is accumulated one number after another in
# float32 by the portable kernel: for a million times 0.1 it is 0.101, an error of 1 %. torch adds in blocks and is right
# to six digits; so is the same file if the mean is taken over one dimension after the other.
# A good engineer would expect pairwise sums, or errors that do not grow with the number of elements.
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


x = torch.full((64, 16384), 0.1)
print("torch:", round(float(x.mean((0, 1))), 4))
print("file, both dimensions:", round(float(on_device(lambda x: x.mean((0, 1)), x)), 4))
print("file, one after the other:", round(float(on_device(lambda x: x.mean(1).mean(0), x)), 4))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file,\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: 0.1
file, both dimensions: 0.101
file, one after the other: 0.1"
echo "$seen"
[ "$seen" = "$expected" ]
