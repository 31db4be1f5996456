"""The same model gives the same code and the same graphs in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from random_models import random_case
from hostile_files import program
from mode_models import CallsWithoutGradients, SwitchesOn
from torch.export import export
from lowerdeck.unflatten import unflatten

torch.manual_seed(0)
programs = [program(preserve=False), program(preserve=True)]
programs.append(export(CallsWithoutGradients(SwitchesOn()), (torch.ones(2, 4),)))
for seed in range(3):
    case = random_case(seed)
    programs.append(export(case.model, *case.arguments()))
    programs.append(programs[-1].run_decompositions())
for program in programs:
    for inplace in (False, True):
        module = unflatten(program, inplace=inplace)
        print(list(module.state_dict()))
        for name, inner in module.named_modules():
            print(name, type(inner).__name__, getattr(inner, "code", ""))
            for node in inner.graph.nodes if hasattr(inner, "graph") else ():
                target = getattr(node.target, "__name__", node.target)
                print(node.op, node.name, target, [str(user) for user in node.users])
"""


def test_code_and_graphs_are_equal_under_every_hash_seed() -> None:
    found = set()
    for seed in ("0", "1", "4242"):
        made = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert made.returncode == 0, made.stderr[-3000:]
        found.add(made.stdout)
    assert len(found) == 1
    assert "def forward" in found.pop()
