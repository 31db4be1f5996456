#!/usr/bin/env bash
# torch 2.13.0, torch.export.export: one tensor object given as two example inputs, or an example input that is also a
# parameter of the module, makes a program that reads only one of the two. No warning; strict and non-strict alike.
# A good engineer would expect an error, or a program that computes what eager does on other inputs: example inputs
# are only examples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


class Difference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x, y):
        return x - 2 * y + 4 * self.weight


tensor, model = torch.ones(2), Difference()
given = torch.full((2,), 10.0), torch.full((2,), 1.0)
print("eager", model(*given).tolist())
for name, example in {
    "two tensors": (tensor, tensor.clone()),
    "one tensor twice": (tensor, tensor),
    "a parameter": (model.weight, tensor),
}.items():
    for strict in (False, True):
        program = torch.export.export(model, example, strict=strict)
        print(f"{name}, strict={strict}", program.module()(*given).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected='eager [12.0, 12.0]
two tensors, strict=False [12.0, 12.0]
two tensors, strict=True [12.0, 12.0]
one tensor twice, strict=False [3.0, 3.0]
one tensor twice, strict=True [3.0, 3.0]
a parameter, strict=False [48.0, 48.0]
a parameter, strict=True [48.0, 48.0]'
echo "$seen"
[ "$seen" = "$expected" ]
