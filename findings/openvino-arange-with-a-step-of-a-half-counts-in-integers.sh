#!/usr/bin/env bash
# openvino 2026.4.1, torch 2.13.0: `torch.arange(0, 5, 0.5)` of an exported program is converted to a range whose numbers
# are cut to integers, since the start is one: 0, 0, 1, 1, 2, 2 and so on, and `torch.arange(0, 1, 0.1)` is all zeros.
# With a start of 0.0, or with dtype=torch.float32, it is right. The result is float32 in each case, and there is no error.
# A good engineer would expect the step to count, or the dtype that the program gives for the node.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "openvino==2026.4.1" "numpy==2.3.5" "packaging==26.0"
cat > "$folder/seen.py" <<'PYTHON'
import openvino
import torch


class Model(torch.nn.Module):
    def __init__(self, *arguments, **options):
        super().__init__()
        self.arguments, self.options = arguments, options

    def forward(self, x):
        return torch.arange(*self.arguments, **self.options) + x


for arguments, options in (
    ((0, 5, 0.5), {}),
    ((0, 15, 1.5), {}),
    ((0, 1, 0.1), {}),
    ((0.0, 5, 0.5), {}),
    ((0, 5, 0.5), {"dtype": torch.float32}),
):
    model, x = Model(*arguments, **options), torch.zeros(10)
    converted = openvino.convert_model(torch.export.export(model, (x,)))
    seen = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x.numpy())[0]
    right = torch.allclose(torch.from_numpy(seen), model(x))
    print(f"arange{arguments} {options or ''}:", "right" if right else f"{seen.dtype} {seen.tolist()}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^arange") || { cat "$folder/log" >&2; exit 1; }
expected="arange(0, 5, 0.5) : float32 [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
arange(0, 15, 1.5) : float32 [0.0, 1.0, 3.0, 4.0, 6.0, 7.0, 9.0, 10.0, 12.0, 13.0]
arange(0, 1, 0.1) : float32 [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
arange(0.0, 5, 0.5) : right
arange(0, 5, 0.5) {'dtype': torch.float32}: right"
echo "$seen"
[ "$seen" = "$expected" ]
