"""Programs whose tensors lie on a GPU, made where there is none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.export import ExportedProgram

from lowerdeck.torch_base import FakeTensor, graphs_of, pytree

_CUDA = torch.device("cuda:0")


def on_cuda(program: ExportedProgram) -> ExportedProgram:
    """Return a program as export gives it on a GPU, all but its weights.

    Args:
        program: Of the CPU; not changed.
    """
    made = copy.deepcopy(program)
    for gm in graphs_of(made.graph_module):
        for node in gm.graph.nodes:
            node.args = pytree.tree_map(_moved, node.args)
            node.kwargs = pytree.tree_map(_moved, dict(node.kwargs))
            if "autocast" in str(node.target):
                node.args = ("cuda", *node.args[1:])
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map(_moved, node.meta["val"])
        gm.recompile()
    return made


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cpu":
        return _CUDA
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    inner = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, inner, _CUDA)
