#!/usr/bin/env bash
# executorch 1.4.1, XNNPACK delegate, seen on x86-64 with AVX-512: `torch.sqrt` of float32 numbers near the top of the range is 1.5
# times too large (sqrt(1e38) is 1.5e19 instead of 1e19), sqrt of infinity is NaN, and `torch.rsqrt(0)` is NaN instead
# of infinity. All are in the range of float32, nothing overflows, and the portable kernels give torch's numbers.
# A good engineer would expect a square root to be correct to rounding for every normal number.
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


x = torch.tensor([[1e30, 1e38, float("inf")]])
print("torch:", [f"{number:.3g}" for number in x.sqrt().flatten().tolist()])
print("file:", [f"{number:.3g}" for number in on_device(lambda x: x.sqrt(), x).flatten().tolist()])
zero = torch.zeros(1, 1)
print("rsqrt(0): torch", zero.rsqrt().item(), "file", on_device(lambda x: x.rsqrt(), zero).item())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(file\|rsqrt(0)\|torch\)") || { cat "$folder/log" >&2; exit 1; }
expected="torch: ['1e+15', '1e+19', 'inf']
file: ['1e+15', '1.5e+19', 'nan']
rsqrt(0): torch inf file nan"
echo "$seen"
[ "$seen" = "$expected" ]
