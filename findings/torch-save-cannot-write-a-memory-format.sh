#!/usr/bin/env bash
# torch 2.13.0: torch.save refuses a checkpoint that holds a memory format (torch.channels_last), with a TypeError about a
# module, although plain pickle takes it, and torch.save takes dtypes and layouts. The reason is torch.save's
# default protocol 2; with pickle_protocol=4 it writes the file, which only torch.load(weights_only=False) reads.
# A good engineer would expect the three kinds of constants of torch to be written alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/seen.py" <<'PYTHON'
import io
import pickle

import torch


def said(function):
    try:
        return repr(function())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def saved(value, weights_only=True, **options):
    stream = io.BytesIO()
    torch.save({"value": value}, stream, **options)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)["value"]


for value in (torch.float16, torch.strided, torch.channels_last, torch.contiguous_format):
    print(value)
    print("  pickle:", said(lambda: pickle.loads(pickle.dumps(value))))
    print("  torch.save:", said(lambda: saved(value)))
    print("  protocol 4:", said(lambda: saved(value, weights_only=False, pickle_protocol=4)))
PYTHON
seen=$("$folder/env/bin/python" -W ignore "$folder/seen.py")
expected="torch.float16
  pickle: torch.float16
  torch.save: torch.float16
  protocol 4: torch.float16
torch.strided
  pickle: torch.strided
  torch.save: torch.strided
  protocol 4: torch.strided
torch.channels_last
  pickle: torch.channels_last
  torch.save: TypeError: cannot pickle 'module' object
  protocol 4: torch.channels_last
torch.contiguous_format
  pickle: torch.contiguous_format
  torch.save: TypeError: cannot pickle 'module' object
  protocol 4: torch.contiguous_format"
echo "$seen"
[ "$seen" = "$expected" ]
