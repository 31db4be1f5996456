#!/usr/bin/env bash
# executorch 1.4.1: `import executorch.runtime` says that the prebuilt library is not found, and to reinstall ExecuTorch,
# where the library is present and loads, and a Python package is missing that only exir uses (here tabulate). The module
# of the binding imports exir for the class of one warning; executorch.runtime reports every ModuleNotFoundError
# of that import as a missing library. A good engineer would look for the .so file, or reinstall.
# Seen with `pip install --no-deps executorch`, as next to a torch that must not be replaced; the binding alone needs
# torch only, and executorch.runtime needs numpy, ruamel.yaml, flatbuffers and tabulate.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip="$folder/env/bin/pip"
"$pip" install --quiet "torch==2.13.0" "numpy==2.4.6" "ruamel.yaml==0.18.16" "flatbuffers==25.12.19"
"$pip" install --quiet --no-deps "executorch==1.4.1"
cat > "$folder/seen.py" <<'PYTHON'
import importlib

import torch


def imported(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return str(error)[:71]
    return "imported"


for name in ("executorch.extension.pybindings._portable_lib", "executorch.runtime"):
    print(f"{name}: {imported(name)}")
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
"$pip" install --quiet --no-warn-conflicts "tabulate==0.9.0"
seen+=$'\nwith tabulate\n'$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected="executorch.extension.pybindings._portable_lib: imported
executorch.runtime: Prebuilt <site-packages>/extension/pybindings/_portable_lib.so is not f
with tabulate
executorch.extension.pybindings._portable_lib: imported
executorch.runtime: imported"
echo "$seen"
[ "$seen" = "$expected" ]
