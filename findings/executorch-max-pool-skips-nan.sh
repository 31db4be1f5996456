#!/usr/bin/env bash
# executorch 1.4.1: the portable kernel of `aten::max_pool2d_with_indices` returns NaN for a window only if the NaN is its
# first element; anywhere else it is skipped, and the pool returns the largest number. torch returns NaN for both.
# A good engineer would expect NaN to spread, so that a NaN in the input is seen in the output.
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


nan = float("nan")
pool = lambda x: torch.nn.functional.max_pool2d(x, 2)
for name, window in (("first", [[nan, 1.0], [2.0, 3.0]]), ("second", [[1.0, nan], [2.0, 3.0]])):
    x = torch.tensor([[window]])
    print(f"NaN {name}: torch {pool(x).item()}, file {on_device(pool, x).item()}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(NaN\)") || { cat "$folder/log" >&2; exit 1; }
expected="NaN first: torch nan, file nan
NaN second: torch nan, file 3.0"
echo "$seen"
[ "$seen" = "$expected" ]
