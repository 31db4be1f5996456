#!/usr/bin/env bash
# torch 2.13.0, onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0: `log_sigmoid` is exported with
# `torch.onnx.export(dynamo=True)` as Log(Sigmoid(x)), and onnxruntime's float32 Sigmoid of -20 is no 2.06e-9 but 0, so
# that the file gives -inf (seen on x86-64), where torch gives -20, and `binary_cross_entropy_with_logits` inf.
# `softplus(-x)`, which is -log_sigmoid(x), is right.
# A good engineer would expect the operators that exist for numerical stability to be stable in a file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "onnx==1.23.2" "onnxscript==0.7.2" "onnxruntime==1.32.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import contextlib
import io
import sys

import onnxruntime
import torch
import torch.nn.functional as F


class Sigmoid(torch.nn.Module):
    def forward(self, x):
        return torch.sigmoid(x)


class LogSigmoid(torch.nn.Module):
    def forward(self, x):
        return F.logsigmoid(x)


class Loss(torch.nn.Module):
    def forward(self, x):
        return F.binary_cross_entropy_with_logits(x, torch.ones(2), reduction="none")


class Softplus(torch.nn.Module):
    def forward(self, x):
        return F.softplus(-x)


def in_runtime(model, *inputs):
    with contextlib.redirect_stdout(io.StringIO()):
        file = torch.onnx.export(model.eval(), inputs, dynamo=True).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})[0]


x = torch.tensor([-10.0, -20.0])
for model in (Sigmoid(), LogSigmoid(), Loss(), Softplus()):
    expected, seen = model(x), torch.as_tensor(in_runtime(model, x))
    verdicts = ["right" if right else "wrong" for right in torch.isclose(seen, expected, rtol=1e-2, atol=0)]
    print(f"{type(model).__name__}: file {verdicts[0]} at -10, {verdicts[1]} at -20")
    print(f"({type(model).__name__}: torch {expected.tolist()}, file {seen.tolist()})", file=sys.stderr)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep ": file ") || { cat "$folder/log" >&2; exit 1; }
expected="Sigmoid: file right at -10, wrong at -20
LogSigmoid: file right at -10, wrong at -20
Loss: file right at -10, wrong at -20
Softplus: file right at -10, right at -20"
grep "^(.*: torch" "$folder/log"
echo "$seen"
[ "$seen" = "$expected" ]
