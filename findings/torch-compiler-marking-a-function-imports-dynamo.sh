#!/usr/bin/env bash
# torch 2.13.0: `torch.compiler.assume_constant_result` sets one attribute of a function, but imports dynamo to do so. A
# library that decorates one method with it, and compiles nothing, imports hundreds of modules of torch (dynamo, inductor,
# distributed) and sympy at its own import: about a second. `torch.compiler.is_compiling` and the import of torch load none.
# A good engineer would expect the decorators of torch.compiler to be as cheap to import as torch.compiler itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import sys

import torch


def report(moment):
    loaded = [name for name in ("sympy", "torch._dynamo", "torch._inductor") if name in sys.modules]
    print(f"{moment}: {', '.join(loaded) or 'none of them'}")


def constant():
    return 1


torch.compiler.is_compiling()
report("torch.compiler is used")
before = len(sys.modules)
torch.compiler.assume_constant_result(constant)
report("a function is marked")
print("attributes:", vars(constant))
print("more than 500 modules:", len(sys.modules) - before > 500)
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py" 2> "$folder/log") || { cat "$folder/log" >&2; exit 1; }
expected="torch.compiler is used: none of them
a function is marked: sympy, torch._dynamo, torch._inductor
attributes: {'_dynamo_marked_constant': True}
more than 500 modules: True"
echo "$seen"
[ "$seen" = "$expected" ]
