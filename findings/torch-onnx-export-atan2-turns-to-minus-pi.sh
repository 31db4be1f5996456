#!/usr/bin/env bash
# torch 2.13.0, onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0: `torch.atan2` and `torch.angle` are written by
# `torch.onnx.export(dynamo=True)` with arctangent and comparisons, and the negative axis falls on the wrong side:
# atan2(0, -1) is -pi in the file and pi in torch, and so is the angle of the complex number -1.
# A good engineer would expect the sign that IEEE 754 and every atan2 give for a positive zero.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "onnx==1.23.2" "onnxscript==0.7.2" "onnxruntime==1.32.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import contextlib
import io

import onnxruntime
import torch


class Direction(torch.nn.Module):
    def forward(self, y, x):
        return torch.atan2(y, x)


class Angle(torch.nn.Module):
    def forward(self, y, x):
        return torch.angle(torch.complex(x, y))


def in_runtime(model, *inputs):
    with contextlib.redirect_stdout(io.StringIO()):
        file = torch.onnx.export(model.eval(), inputs, dynamo=True).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})[0]


y, x = torch.tensor([0.0, 1e-6, -1e-6]), torch.tensor([-1.0, -1.0, -1.0])
for name, model in (("atan2", Direction()), ("angle", Angle())):
    print(f"{name}, torch:", [f"{angle:.3f}" for angle in model(y, x).tolist()])
    print(f"{name}, file:", [f"{angle:.3f}" for angle in in_runtime(model, y, x).tolist()])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^a.*, \(torch\|file\)") || { cat "$folder/log" >&2; exit 1; }
expected="atan2, torch: ['3.142', '3.142', '-3.142']
atan2, file: ['-3.142', '3.142', '-3.142']
angle, torch: ['3.142', '3.142', '-3.142']
angle, file: ['-3.142', '3.142', '-3.142']"
echo "$seen"
[ "$seen" = "$expected" ]
