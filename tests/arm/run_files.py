"""Run files in the official runtime, wherever this is: ``python run_files.py STEM...``.

Of each stem there are ``STEM.ours.pte`` and ``STEM.io``, its inputs and the results expected. A
line of JSON is printed for each.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

binding = importlib.import_module("executorch.extension.pybindings._portable_lib")
torch.set_num_threads(1)
for stem in sys.argv[1:]:
    told: dict[str, object] = {"stem": stem}
    try:
        inputs, expected = torch.load(f"{stem}.io")
        module = binding._load_for_executorch(f"{stem}.ours.pte")
        found = module.run_method("forward", list(inputs))[0].float()
        largest = float(expected.float().abs().max()) or 1.0
        told["error"] = float((found - expected.float()).abs().max()) / largest
    except RuntimeError as error:
        told["fails"] = str(error).splitlines()[0]
    print("FOUND", json.dumps(told), flush=True)
