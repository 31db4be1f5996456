#!/usr/bin/env bash
# torch 2.13.0: a branch of torch.cond that calls torch._check_tensor_all (transformers' torch_compilable_check does) is
# exported, and the program runs; run_decompositions() of it ends in a bare AttributeError of torch's own pass that
# inserts run-time assertions. The same check outside of a branch is decomposed.
# A good engineer would expect a program that exports and runs to decompose.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


def checked(x):
    torch._check_tensor_all((x > 0).sum() == 2, lambda: "not two")
    return x * 2


class Plain(torch.nn.Module):
    def forward(self, x):
        return checked(x)


class Branch(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() < 9, checked, torch.relu, (x,))


x = torch.tensor([1.0, 2.0, -1.0])
for model in (Plain(), Branch()):
    program = torch.export.export(model, (x,))
    print(type(model).__name__, program.module()(x).tolist())
    try:
        print("decomposed", program.run_decompositions().module()(x).tolist())
    except Exception as error:
        print("decomposed", type(error).__name__, str(error).splitlines()[0])
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2>"$folder/log")
expected="Plain [2.0, 4.0, -2.0]
decomposed [2.0, 4.0, -2.0]
Branch [2.0, 4.0, -2.0]
decomposed AttributeError 'bool' object has no attribute 'node'"
echo "$seen"
[ "$seen" = "$expected" ]
