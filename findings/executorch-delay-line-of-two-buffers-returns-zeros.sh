#!/usr/bin/env bash
# executorch 1.4.1: a delay line of two buffers (`a` takes the value of `b`, `b` the input) always returns 0: the new value of
# `a` is the placeholder of another buffer, and exir writes such a value back to no buffer. torch's exported and
# decomposed program is right. With `self.a.copy_(self.b + 0)` the file is right as well.
# A good engineer would expect each mutation in the program's signature to be in the file, or an error.
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


class Delay(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.register_buffer("a", torch.zeros(1))
        self.register_buffer("b", torch.zeros(1))
        self.extra = extra

    def forward(self, x):
        out = self.a * 1
        self.a.copy_(self.b + 0 if self.extra else self.b)
        self.b.copy_(x)
        return out


steps = [torch.tensor([float(number)]) for number in range(1, 5)]
program = torch.export.export(Delay(False), (steps[0],)).run_decompositions().module()
print("decomposed program:", [program(x).item() for x in steps])
for extra in (False, True):
    file = on_device(Delay(extra), steps[0])
    print("file, b + 0:" if extra else "file, b:", [file.forward((x,))[0].item() for x in steps])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(decomposed\|file,\)") || { cat "$folder/log" >&2; exit 1; }
expected="decomposed program: [0.0, 0.0, 1.0, 2.0]
file, b: [0.0, 0.0, 0.0, 0.0]
file, b + 0: [0.0, 0.0, 1.0, 2.0]"
echo "$seen"
[ "$seen" = "$expected" ]
