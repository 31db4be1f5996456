#!/usr/bin/env bash
# executorch 1.4.1: a buffer that the model changes starts at 0 in the file, whatever its value was when the model was exported.
# A counter that was saved at 5 counts 1, 2 on the device and 6, 7 in torch; `program.module()` of the exported program
# is right. Buffers that are only read keep their values. The initial value is written only if one adds a pass for it.
# A good engineer would expect the state of a program to be in its file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "ruamel.yaml==0.18.16" "flatbuffers==25.12.19" "tabulate==0.9.0" "pyyaml==6.0.3" "pandas==2.3.3"
"$pip" install --quiet --no-deps "executorch==1.4.1" "torchao==0.18.0"
cat > "$folder/seen.py" <<'PYTHON'
import torch
from executorch.exir import to_edge
from executorch.extension.pybindings import _portable_lib


def on_device(model, *inputs):
    file = to_edge(torch.export.export(model, inputs)).to_executorch().buffer
    return _portable_lib._load_for_executorch_from_buffer(file)


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.full((1,), 5.0))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


x = torch.zeros(1)
program = torch.export.export(Counter(), (x,)).module()
file = on_device(Counter(), x)
print("exported program:", [program(x).item() for _ in range(2)])
print("file:", [file.forward((x,))[0].item() for _ in range(2)])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(exported\|file\)") || { cat "$folder/log" >&2; exit 1; }
expected="exported program: [6.0, 7.0]
file: [1.0, 2.0]"
echo "$seen"
[ "$seen" = "$expected" ]
