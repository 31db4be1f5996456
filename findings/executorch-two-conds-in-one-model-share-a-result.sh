#!/usr/bin/env bash
# executorch 1.4.1: a model with two `torch.cond` calls, one after the other, lowers and runs without an error, but the result
# of the first is overwritten by the second before it is used: here sin(1) + 3 = 3.84 becomes 3 + 3. Each alone is right.
# The graphs of branches get their memory from one region that all calls share.
# A good engineer would expect memory planning to keep a value until its last use, also across control flow.
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


def on_device(model, *inputs):
    file = to_edge(torch.export.export(model, inputs)).to_executorch().buffer
    return _portable_lib._load_for_executorch_from_buffer(file)


class Model(torch.nn.Module):
    def forward(self, x):
        first = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        second = torch.cond(x.sum() > 10, lambda x: x * 2, lambda x: x * 3, (x,))
        return first + second


x = torch.ones(2)
print("torch:", [round(number, 2) for number in Model()(x).tolist()])
print("file:", [round(number, 2) for number in on_device(Model(), x).forward((x,))[0].tolist()])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: [3.84, 3.84]
file: [6.0, 6.0]"
echo "$seen"
[ "$seen" = "$expected" ]
