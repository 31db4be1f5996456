#!/usr/bin/env bash
# pnnx 20261020 with ncnn 1.0.20261020, CPU: `torch.div(x, 2, rounding_mode="floor")` of torch 2.13.0 is an ordinary
# division, and "trunc" rounds down. `x // 2` rounds down, as it should. A good engineer would expect the three to be
# imported from one table of roundings, or an error.
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


x = torch.tensor([[-7.0, -5, 5, 7]])
for mode in ("floor", "trunc"):
    show(mode, lambda x: torch.div(x, 2, rounding_mode=mode), x)
show("x // 2", lambda x: x // 2, x)
PYTHON
cd "$folder"
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | sed -n "s/^SEEN //p") || { cat "$folder/log" >&2; exit 1; }
expected="floor torch [-4.0, -3.0, 2.0, 3.0]
floor ncnn  [-3.5, -2.5, 2.5, 3.5]
trunc torch [-3.0, -2.0, 2.0, 3.0]
trunc ncnn  [-4.0, -3.0, 2.0, 3.0]
x // 2 torch [-4.0, -3.0, 2.0, 3.0]
x // 2 ncnn  [-4.0, -3.0, 2.0, 3.0]"
echo "$seen"
[ "$seen" = "$expected" ]
