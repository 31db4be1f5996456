#!/usr/bin/env bash
# executorch 1.4.1: a method exported with a contiguous image takes a channels_last tensor of the same shape and dtype without an
# error, and reads its bytes as if it were contiguous: channels and pixels are mixed up. Shape and dtype of inputs are
# checked, the order of dimensions in memory is not.
# A good engineer would expect a conversion or an error, as for a wrong shape.
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


image = torch.arange(8.0).reshape(1, 2, 2, 2)
model = torch.nn.Module()
model.forward = lambda x: x * 1
file = on_device(model, image)
for name, given in (
    ("contiguous", image),
    ("channels_last", image.to(memory_format=torch.channels_last)),
):
    print(f"{name}:", file.forward((given,))[0].flatten().tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(channels_last\|contiguous\)") || { cat "$folder/log" >&2; exit 1; }
expected="contiguous: [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
channels_last: [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]"
echo "$seen"
[ "$seen" = "$expected" ]
