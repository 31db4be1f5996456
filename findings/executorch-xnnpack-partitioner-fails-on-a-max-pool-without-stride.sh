#!/usr/bin/env bash
# executorch 1.4.1: `torch.nn.functional.max_pool2d(x, 2)` exports, and its stride is left out of the exported call, since
# torch's default is the window. `to_edge_transform_and_lower` with XnnpackPartitioner then raises a bare IndexError from
# the partitioner. `torch.nn.MaxPool2d(2)`, whose module passes the stride, lowers and runs.
# A good engineer would expect the functional and the module form of one pool to lower alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "ruamel.yaml==0.18.16" "flatbuffers==25.12.19" "tabulate==0.9.0" "pyyaml==6.0.3" "pandas==2.3.3"
"$pip" install --quiet --no-deps "executorch==1.4.1" "torchao==0.18.0"
cat > "$folder/seen.py" <<'PYTHON'
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.pybindings import _portable_lib


def on_device(function, *inputs):
    model = torch.nn.Module()
    model.forward = function
    program = torch.export.export(model.eval(), inputs)
    manager = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    file = manager.to_executorch().buffer
    return _portable_lib._load_for_executorch_from_buffer(file).forward(inputs)[0]


x = torch.randn(1, 2, 4, 4)
for name, pool in (
    ("module", torch.nn.MaxPool2d(2)),
    ("functional", lambda x: torch.nn.functional.max_pool2d(x, 2)),
):
    try:
        print(f"{name}: equals torch: {torch.equal(on_device(lambda x: pool(x), x), pool(x))}")
    except IndexError as error:
        print(f"{name}: IndexError: {error}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(functional\|module\)") || { cat "$folder/log" >&2; exit 1; }
expected="module: equals torch: True
functional: IndexError: tuple index out of range"
echo "$seen"
[ "$seen" = "$expected" ]
