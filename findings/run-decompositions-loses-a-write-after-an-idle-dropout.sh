#!/usr/bin/env bash
# torch 2.13.0, ExportedProgram.run_decompositions: dropout in evaluation returns its argument itself, but its schema says
# that the result is a new tensor. A write in place to the argument after it is lost in the decomposed program, as is a
# write to a part of `torch.unsafe_chunk`. The exported program itself is right; no warning.
# A good engineer would expect dropout in evaluation to be nothing at all, for decompositions too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


class Dropped(torch.nn.Module):
    def forward(self, x):
        x = x * 2
        y = torch.nn.functional.dropout(x, training=False)
        x.add_(1)
        return y


class Chunked(torch.nn.Module):
    def forward(self, x):
        x = x * 2
        torch.unsafe_chunk(x, 2)[0].add_(1)
        return x


x = torch.ones(2, 1)
for model in (Dropped(), Chunked()):
    program = torch.export.export(model, (x,))
    print(type(model).__name__, "eager", model(x).flatten().tolist())
    print("exported", program.module()(x).flatten().tolist())
    print("decomposed", program.run_decompositions().module()(x).flatten().tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected='Dropped eager [3.0, 3.0]
exported [3.0, 3.0]
decomposed [2.0, 2.0]
Chunked eager [3.0, 2.0]
exported [3.0, 2.0]
decomposed [2.0, 2.0]'
echo "$seen"
[ "$seen" = "$expected" ]
