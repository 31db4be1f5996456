#!/usr/bin/env bash
# pnnx 20261020 with ncnn 1.0.20261020, CPU: `torch.linalg.vector_norm(x, 3, dim=2)` of torch 2.13.0, and the same with
# order infinity, return one number: the sum of all numbers of the tensor. Order and dimension are both ignored; order 2 is
# right. A good engineer would expect an error for an order that the format lacks.
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


x = torch.tensor([[[1.0, -2, 3], [4, 5, -6]]])
for order in (2, 3, float("inf")):
    show(f"order {order}", lambda x: torch.linalg.vector_norm(x, order, dim=2), x)
PYTHON
cd "$folder"
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | sed -n "s/^SEEN //p") || { cat "$folder/log" >&2; exit 1; }
expected="order 2 torch [3.742, 8.775]
order 2 ncnn  [3.742, 8.775]
order 3 torch [3.302, 7.399]
order 3 ncnn  [5.0]
order inf torch [3.0, 6.0]
order inf ncnn  [5.0]"
echo "$seen"
[ "$seen" = "$expected" ]
