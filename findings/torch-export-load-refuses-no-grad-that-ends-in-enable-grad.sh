#!/usr/bin/env bash
# torch 2.13.0: a model with a no_grad region whose last part runs under enable_grad is exported, runs, and is saved by
# torch.export.save without a word; torch.export.load raises a SpecViolationError for the file. Where no_grad goes on
# after the inner region the file loads, and so it does with a region of no_grad or autocast alone. A good engineer
# would expect that what export made and save wrote can be loaded, or that save refuses.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import io
import logging
import warnings

import torch

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


class Model(torch.nn.Module):
    def __init__(self, goes_on):
        super().__init__()
        self.goes_on = goes_on

    def forward(self, x):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = y.sin()
            if self.goes_on:
                z = z + 1
        return z * 2


class Whole(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        with self.mode():
            return x @ x


def outcome(model):
    x = torch.ones(3, 3)
    program = torch.export.export(model, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    try:
        loaded = torch.export.load(file)
    except Exception as error:
        return type(error).__name__
    return "equal" if torch.equal(loaded.module()(x), model(x)) else "other numbers"


for name, model in {
    "no_grad goes on after enable_grad": Model(True),
    "no_grad ends in enable_grad": Model(False),
    "no_grad at the end": Whole(torch.no_grad),
    "autocast at the end": Whole(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
}.items():
    print(f"{name}: {outcome(model)}")
PYTHON
seen=$("$folder/env/bin/python" "$folder/seen.py" 2> /dev/null)
expected='no_grad goes on after enable_grad: equal
no_grad ends in enable_grad: SpecViolationError
no_grad at the end: equal
autocast at the end: equal'
echo "$seen"
[ "$seen" = "$expected" ]
