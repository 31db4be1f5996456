#!/usr/bin/env bash
# pnnx 20261020 with ncnn 1.0.20261020, CPU: `F.pad(x, (1, 1, 1, 1), mode="circular")` of torch 2.13.0 pads zeros, without
# a warning; replicate is right. A good engineer would expect an error for a mode that
# the format lacks.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "pnnx==20261020" "ncnn==1.0.20261020" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import ncnn
import numpy
import pnnx
import torch


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def ncnn_of(function, x):
    pnnx.export(Model(function).eval(), "model.pt", (x,))
    net = ncnn.Net()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.load_param("model.ncnn.param")
    net.load_model("model.ncnn.bin")
    extractor = net.create_extractor()
    extractor.input("in0", ncnn.Mat(x.numpy()).clone())
    return numpy.array(extractor.extract("out0")[1])


def show(name, function, x):
    print("SEEN", name, "torch", function(x).numpy().ravel().astype("float64").round(3).tolist())
    print("SEEN", name, "ncnn ", ncnn_of(function, x).ravel().astype("float64").round(3).tolist())


x = torch.arange(1.0, 5).reshape(1, 1, 2, 2)
for mode in ("circular", "replicate"):
    show(mode, lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1), mode=mode), x)
PYTHON
cd "$folder"
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | sed -n "s/^SEEN //p") || { cat "$folder/log" >&2; exit 1; }
expected="circular torch [4.0, 3.0, 4.0, 3.0, 2.0, 1.0, 2.0, 1.0, 4.0, 3.0, 4.0, 3.0, 2.0, 1.0, 2.0, 1.0]
circular ncnn  [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]
replicate torch [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 3.0, 3.0, 4.0, 4.0]
replicate ncnn  [1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 3.0, 3.0, 4.0, 4.0]"
echo "$seen"
[ "$seen" = "$expected" ]
