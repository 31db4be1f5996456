#!/usr/bin/env bash
# pnnx 20261020 with ncnn 1.0.20261020, CPU: `F.normalize(x, dim=1)` of torch 2.13.0, as at the end of embedding models, divides each
# number by its own magnitude, so that all results are 1 or -1. `x / x.norm(dim=1, keepdim=True)` is right. A good engineer would expect the
# two spellings to agree.
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


x = torch.tensor([3.0, -4, 6, 8]).reshape(1, 2, 1, 2)
show("normalize", lambda x: torch.nn.functional.normalize(x, dim=1), x)
show("by hand", lambda x: x / x.norm(dim=1, keepdim=True), x)
PYTHON
cd "$folder"
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | sed -n "s/^SEEN //p") || { cat "$folder/log" >&2; exit 1; }
expected="normalize torch [0.447, -0.447, 0.894, 0.894]
normalize ncnn  [1.0, -1.0, 1.0, 1.0]
by hand torch [0.447, -0.447, 0.894, 0.894]
by hand ncnn  [0.447, -0.447, 0.894, 0.894]"
echo "$seen"
[ "$seen" = "$expected" ]
