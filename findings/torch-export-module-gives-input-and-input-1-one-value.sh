#!/usr/bin/env bash
# torch 2.13.0, ExportedProgram.module(): a model whose arguments are called `input` and `input_1` (or another Python
# builtin and its `_1`) exports, but the module of the program uses the first argument for both. No error, no warning;
# strict and non-strict, before and after run_decompositions.
# A good engineer would expect argument names to have no influence on numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


class Builtin(torch.nn.Module):
    def forward(self, input, input_1):
        return input - input_1


class Other(torch.nn.Module):
    def forward(self, x, x_1):
        return x - x_1


given = torch.full((2,), 5.0), torch.full((2,), 3.0)
for model in (Builtin(), Other()):
    print(type(model).__name__, "eager", model(*given).tolist())
    for strict in (False, True):
        program = torch.export.export(model, given, strict=strict)
        decomposed = program.run_decompositions()
        print(f"strict={strict}", program.module()(*given).tolist(), decomposed.module()(*given).tolist())
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected='Builtin eager [2.0, 2.0]
strict=False [0.0, 0.0] [0.0, 0.0]
strict=True [0.0, 0.0] [0.0, 0.0]
Other eager [2.0, 2.0]
strict=False [2.0, 2.0] [2.0, 2.0]
strict=True [2.0, 2.0] [2.0, 2.0]'
echo "$seen"
[ "$seen" = "$expected" ]
