#!/usr/bin/env bash
# executorch 1.4.1: the portable kernel of `aten::cumsum` adds float16 in float16. A running sum of ones stops at 2048,
# because 2049 is no float16 and 2048 + 1 is rounded to 2048. torch accumulates in float32 and rounds each result:
# the 4096th is 4096. `sum` of the same file gives 4096 as well.
# A good engineer would expect accumulation in a wider type, as in `sum`.
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


x = torch.ones(4096, dtype=torch.float16)
print("torch:", float(x.cumsum(0)[-1]))
print("file, cumsum:", float(on_device(lambda x: x.cumsum(0), x)[-1]))
print("file, sum:", float(on_device(lambda x: x.sum(0), x)))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file,\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: 4096.0
file, cumsum: 2048.0
file, sum: 4096.0"
echo "$seen"
[ "$seen" = "$expected" ]
