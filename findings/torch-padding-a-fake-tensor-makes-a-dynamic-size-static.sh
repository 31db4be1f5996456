#!/usr/bin/env bash
# torch 2.13.0: a pass over an exported program that computes shapes with the program's own fake tensors (meta["val"], in
# their FakeTensorMode) may use cat or relu, which leave the program alone. F.pad of such a tensor makes the dynamic size
# static in the whole program: the shape of the input becomes the exported one, run_decompositions returns a program for
# that size only, and nothing is raised when it happens. Under torch's Python dispatcher, as in a trace, it does not happen.
# A good engineer would expect shape inference to read sizes, never to fix them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.3.5"
cat > "$folder/seen.py" <<'PYTHON'
import logging
import warnings

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.export import Dim, export

logging.disable(logging.CRITICAL)
warnings.simplefilter("ignore")


def rows_after(infer):
    rows = Dim("rows", max=7)
    program = export(torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: rows},))
    value = next(iter(program.graph.nodes)).meta["val"]
    with value.fake_mode:
        infer(value)
    decomposed = program.run_decompositions()
    try:
        decomposed.module()(torch.ones(5, 2))
    except Exception:
        return "only 4 rows"
    return "any number of rows"


def pad(value):
    return torch.nn.functional.pad(value, (0, 0, 1, 1))


def pad_in_python(value):
    with enable_python_dispatcher():
        return pad(value)


for name, infer in {
    "relu": torch.relu,
    "cat": lambda value: torch.cat([value, value]),
    "pad": pad,
    "pad under the Python dispatcher": pad_in_python,
}.items():
    print(f"{name}: {rows_after(infer)}")
PYTHON
seen=$("$folder/env/bin/python" "$folder/seen.py" 2> /dev/null)
expected='relu: any number of rows
cat: any number of rows
pad: only 4 rows
pad under the Python dispatcher: any number of rows'
echo "$seen"
[ "$seen" = "$expected" ]
