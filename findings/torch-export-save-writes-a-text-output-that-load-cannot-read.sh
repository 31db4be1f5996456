#!/usr/bin/env bash
# torch 2.13.0, torch.export: a model that returns a text beside its tensors (a label, the name of a task) exports, and its
# program is saved without a word, but torch.export.load refuses the file with a message that names nothing.
# Numbers, truths and None in the same place are loaded.
# A good engineer would expect save to refuse what load cannot read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import io
import logging

import torch

logging.disable(logging.CRITICAL)


class Model(torch.nn.Module):
    def __init__(self, more):
        super().__init__()
        self.more = more

    def forward(self, x):
        return {"task": self.more, "scores": x + 1}


for more in ("classify", 3, 2.5, True, None):
    program = torch.export.export(Model(more), (torch.ones(2),))
    print(repr(more), "exported:", repr(program.module()(torch.ones(2))["task"]), end=", ")
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    try:
        loaded = torch.export.load(stream)
        print("loaded:", repr(loaded.module()(torch.ones(2))["task"]))
    except RuntimeError as error:
        print("not loaded:", str(error).split(".")[0])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected="'classify' exported: 'classify', not loaded: We ran into an error when deserializing the saved file
3 exported: 3, loaded: 3
2.5 exported: 2.5, loaded: 2.5
True exported: True, loaded: True
None exported: None, loaded: None"
echo "$seen"
[ "$seen" = "$expected" ]
