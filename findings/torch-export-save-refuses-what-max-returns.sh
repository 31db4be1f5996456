#!/usr/bin/env bash
# torch 2.13.0, torch.export.save: a model that returns the result of torch.max(x, dim), min, sort, topk or another operator
# with a named result exports, runs and decomposes, but cannot be saved: its structure has no name to be written under.
# The same model with (values, indices) as a plain tuple is saved and loaded.
# A good engineer would expect what export accepts as an output to be saved as well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import io

import torch


class Named(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Plain(Named):
    def forward(self, x):
        return tuple(self.function(x))


FUNCTIONS = {
    "max": lambda x: x.max(-1),
    "sort": lambda x: x.sort(-1),
    "topk": lambda x: x.topk(2),
    "aminmax": lambda x: torch.aminmax(x),
    "svd": lambda x: torch.linalg.svd(x),
}
x = torch.arange(6.0).reshape(2, 3)
for name, function in FUNCTIONS.items():
    for kind in (Named, Plain):
        program = torch.export.export(kind(function), (x,))
        program.module()(x)
        stream = io.BytesIO()
        try:
            torch.export.save(program, stream)
            stream.seek(0)
            torch.export.load(stream).module()(x)
            print(name, kind.__name__, "saved and loaded")
        except NotImplementedError as error:
            print(name, kind.__name__, str(error).split(" found")[0])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected="max Named No registered serialization name for <class 'torch.return_types.max'>
max Plain saved and loaded
sort Named No registered serialization name for <class 'torch.return_types.sort'>
sort Plain saved and loaded
topk Named No registered serialization name for <class 'torch.return_types.topk'>
topk Plain saved and loaded
aminmax Named No registered serialization name for <class 'torch.return_types.aminmax'>
aminmax Plain saved and loaded
svd Named No registered serialization name for <class 'torch.return_types.linalg_svd'>
svd Plain saved and loaded"
echo "$seen"
[ "$seen" = "$expected" ]
