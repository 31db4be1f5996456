#!/usr/bin/env bash
# torch 2.13.0: `torch.export.unflatten` of a model whose module is called twice and picks another child each time, as a
# mixture of experts does, runs the first child in both calls. The exported program and `program.module()` are right; the
# unflattened module has all weights and gives another result, without an error. Both calls have the same operators and
# are taken for one.
# A good engineer would expect unflattening to change the form of a program and none of its numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import torch


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])

    def forward(self, x, chosen):
        return self.experts[chosen](x)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture = Experts()

    def forward(self, x):
        return self.mixture(x, 0) - self.mixture(x, 1)


torch.manual_seed(0)
model, x = Model().eval(), torch.randn(2, 3)
program = torch.export.export(model, (x,))
module = torch.export.unflatten(program)
print("program equals eager:", torch.allclose(program.module()(x), model(x)))
print("unflattened equals eager:", torch.allclose(module(x), model(x)))
print("unflattened is zero:", bool((module(x) == 0).all()))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log" | grep "^\(program\|unflattened\)") || { cat "$folder/log" >&2; exit 1; }
expected="program equals eager: True
unflattened equals eager: False
unflattened is zero: True"
echo "$seen"
[ "$seen" = "$expected" ]
