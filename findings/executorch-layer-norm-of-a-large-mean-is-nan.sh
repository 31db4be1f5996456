#!/usr/bin/env bash
# executorch 1.4.1: the portable kernel of `aten::native_layer_norm` computes the variance as the mean of the squares less
# the square of the mean. Rows with a mean of 10,000 and a deviation of 1, as raw sensor values or pixel sums may be,
# give NaN, and with a mean of 1,000 numbers that are off by more than 0.001. torch is right in the first two digits at least.
# A good engineer would expect two passes or Welford's algorithm, as in torch, and errors near rounding.
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


torch.manual_seed(0)
norm = lambda x: torch.nn.functional.layer_norm(x, (64,))
for mean in (0, 1000, 10000):
    x = mean + torch.randn(4, 64)
    exact = norm(x.double())
    eager = (norm(x) - exact).abs().max()
    error = (on_device(norm, x) - exact).abs().max()
    described = "nan" if error.isnan() else "below 1e-4" if error < 1e-4 else "above 1e-3"
    print(f"mean {mean}: eager below 1e-2: {bool(eager < 1e-2)}, error of the file: {described}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(mean\)") || { cat "$folder/log" >&2; exit 1; }
expected="mean 0: eager below 1e-2: True, error of the file: below 1e-4
mean 1000: eager below 1e-2: True, error of the file: above 1e-3
mean 10000: eager below 1e-2: True, error of the file: nan"
echo "$seen"
[ "$seen" = "$expected" ]
