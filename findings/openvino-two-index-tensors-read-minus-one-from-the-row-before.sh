#!/usr/bin/env bash
# openvino 2026.4.1, torch 2.13.0, CPU: `x[i, j]` of two index tensors, converted from an exported program, takes a
# negative number in the last one as it is: x[1, -1] of a 3 x 4 matrix gives x[0, 3], the element before the row. The
# two indices become one into the flattened matrix, i * 4 + j, and only i is wrapped before. One index tensor, `x[j]`, is
# right, and so is writing with `index_put`. No error.
# A good engineer would expect -1 to mean the last element, or an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "openvino==2026.4.1" "numpy==2.3.5" "packaging==26.0"
cat > "$folder/seen.py" <<'PYTHON'
import openvino
import torch


def on_cpu(model, *inputs):
    program = torch.export.export(model.eval(), inputs)
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(openvino.convert_model(program), "CPU", settings)
    return torch.as_tensor(compiled([x.numpy() for x in inputs])[0])


class Pick(torch.nn.Module):
    def forward(self, x, i, j):
        return x[i, j]


class Rows(torch.nn.Module):
    def forward(self, x, i):
        return x[i]


class Write(torch.nn.Module):
    def forward(self, x, i, j):
        return x.index_put((i, j), torch.tensor(-5.0))


x = torch.arange(12.0).reshape(3, 4)
first, negative = torch.tensor([1, -1]), torch.tensor([-1, -2])
cases = {
    "x[[1, -1], [-1, -2]]": (Pick(), x, first, negative),
    "x[[-1, -2]]": (Rows(), x, negative),
    "x.index_put": (Write(), x, first, negative),
}
for name, (model, *inputs) in cases.items():
    expected, seen = model(*inputs), on_cpu(model, *inputs)
    right = torch.equal(expected, seen)
    print(f"{name}: {'right' if right else f'torch {expected.tolist()}, openvino {seen.tolist()}'}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^x") || { cat "$folder/log" >&2; exit 1; }
expected="x[[1, -1], [-1, -2]]: torch [7.0, 10.0], openvino [3.0, 6.0]
x[[-1, -2]]: right
x.index_put: right"
echo "$seen"
[ "$seen" = "$expected" ]
