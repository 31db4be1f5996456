#!/usr/bin/env bash
# torch 2.13.0, onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0: `scatter_reduce` with "mean", as graph networks use,
# exports with `torch.onnx.export(dynamo=True)` to a ScatterElements whose reduction is "none": of the values for one
# place the last one is kept. "sum" and "amax" are right. No error, no warning.
# A good engineer would expect an error, as ONNX has no such reduction, or a sum divided by a count.
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


class Pool(torch.nn.Module):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, values, places):
        return torch.zeros(2).scatter_reduce(0, places, values, self.reduction, include_self=False)


def in_runtime(model, *inputs):
    with contextlib.redirect_stdout(io.StringIO()):
        file = torch.onnx.export(model.eval(), inputs, dynamo=True).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(file)
    names = [x.name for x in session.get_inputs()]
    return session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})[0]


values, places = torch.tensor([1.0, 2.0, 9.0, 5.0]), torch.tensor([0, 0, 0, 1])
for reduction in ("sum", "amax", "mean"):
    model = Pool(reduction)
    print(f"{reduction}: torch {model(values, places).tolist()}, file {in_runtime(model, values, places).tolist()}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep ": torch ") || { cat "$folder/log" >&2; exit 1; }
expected="sum: torch [12.0, 5.0], file [12.0, 5.0]
amax: torch [9.0, 5.0], file [9.0, 5.0]
mean: torch [4.0, 5.0], file [9.0, 5.0]"
echo "$seen"
[ "$seen" = "$expected" ]
