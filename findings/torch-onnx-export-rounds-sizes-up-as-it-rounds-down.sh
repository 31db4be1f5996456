#!/usr/bin/env bash
# torch 2.13.0, onnxscript 0.7.2, onnx 1.23.2, onnxruntime 1.32.0: `-(-n // 2)`, Python's way to round up, of a dynamic
# size n is rounded down in a file of `torch.onnx.export(dynamo=True)`: the division of sizes becomes ONNX's Div, which
# truncates, and -5 // 2 is -2 there. `(n + 1) // 2` is right, and so is `-(-t // 2)` of an integer tensor. The exported
# program itself is right.
# A good engineer would expect `//` of a size to floor as `//` of a tensor does.
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


class Pairs(torch.nn.Module):
    def forward(self, x, t):
        size = x.shape[0]
        return torch.arange(-(-size // 2)), torch.arange((size + 1) // 2), -(-t // 2), x


def inputs(size):
    return torch.arange(float(size)), torch.tensor([size])


dynamic = {"x": {0: torch.export.Dim("size", min=3)}, "t": None}
program = torch.export.export(Pairs(), inputs(8), dynamic_shapes=dynamic)
with contextlib.redirect_stdout(io.StringIO()):
    file = torch.onnx.export(program, dynamo=True).model_proto.SerializeToString()
session = onnxruntime.InferenceSession(file)
names = [x.name for x in session.get_inputs()]
feed = {name: x.numpy() for name, x in zip(names, inputs(5))}
for origin, results in (("program", program.module()(*inputs(5))), ("file", session.run(None, feed))):
    negated, added, tensor, _ = results
    print(f"{origin}: pairs in 5: {len(negated)} of -(-n // 2), {len(added)} of (n + 1) // 2, {tensor.item()} of a tensor")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "pairs in 5") || { cat "$folder/log" >&2; exit 1; }
expected="program: pairs in 5: 3 of -(-n // 2), 3 of (n + 1) // 2, 3 of a tensor
file: pairs in 5: 2 of -(-n // 2), 3 of (n + 1) // 2, 3 of a tensor"
echo "$seen"
[ "$seen" = "$expected" ]
