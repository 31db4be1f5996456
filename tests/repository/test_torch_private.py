"""Private names of torch are used in one module per package, and each name in one package."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.fx import Graph, symbolic_trace

from tools import torch_private
from tools.torch_private import private_module
from tools.workspace import PACKAGES, ROOT


def _torchs_own_attributes():
    traced = symbolic_trace(lambda x: x)
    objects = (
        *(torch.ones(1), torch.nn.Linear(1, 1), torch.export.ExportedProgram),
        *(traced, Graph(), next(iter(traced.graph.nodes))),
        *(torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.ops.higher_order.cond),
    )
    names = {name for thing in objects for name in dir(thing)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("package", PACKAGES)
def test_only_one_module_touches_what_is_private_in_torch(package):
    own, of_torch = torch_private.own_names(package), _torchs_own_attributes()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in torch_private.sources(package)
        if path.name != torch_private.MODULE
        for line, name in torch_private.private_uses(path, own, of_torch)
    ]
    assert not found, f"take it from {private_module(package)}"


def test_what_two_packages_need_is_in_torch_base():
    users = defaultdict(list)
    for package in PACKAGES:
        for name in torch_private.touched_names(package):
            users[name].append(package)
    doubled = {name: packages for name, packages in users.items() if len(packages) > 1}
    assert not doubled, "each fact has one place: offer it in torch_base, and take it from there"
