#!/usr/bin/env bash
# pnnx 20261020 with ncnn 1.0.20261020, CPU: `torch.chunk(x, 3, dim=2)` of 7 columns has 3, 3 and 1 columns in torch 2.13.0, and 2, 2
# and 3 in ncnn, so that each part starts elsewhere. `torch.split(x, 3, dim=2)` is right. A good engineer would expect an uneven
# chunk to keep its sizes, which are known when it is imported.
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


x = torch.arange(14.0).reshape(1, 2, 7)
for part in range(3):
    show(f"chunk {part}", lambda x: torch.chunk(x, 3, dim=2)[part] + 0, x)
show("split 2", lambda x: torch.split(x, 3, dim=2)[2] + 0, x)
PYTHON
cd "$folder"
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | sed -n "s/^SEEN //p") || { cat "$folder/log" >&2; exit 1; }
expected="chunk 0 torch [0.0, 1.0, 2.0, 7.0, 8.0, 9.0]
chunk 0 ncnn  [0.0, 1.0, 7.0, 8.0]
chunk 1 torch [3.0, 4.0, 5.0, 10.0, 11.0, 12.0]
chunk 1 ncnn  [2.0, 3.0, 9.0, 10.0]
chunk 2 torch [6.0, 13.0]
chunk 2 ncnn  [4.0, 5.0, 6.0, 11.0, 12.0, 13.0]
split 2 torch [6.0, 13.0]
split 2 ncnn  [6.0, 13.0]"
echo "$seen"
[ "$seen" = "$expected" ]
