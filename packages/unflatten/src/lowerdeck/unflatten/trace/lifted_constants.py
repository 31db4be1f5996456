"""Constants that eager makes anew in each call, such as ``torch.tensor(0.5)``.

Export lifts one for every call. Two calls of a module that make equal ones are one form of it, so
that they read one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import sha256

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.torch_base import bytes_of
from lowerdeck.unflatten.trace.flat_items import MODE_REGIONS
from lowerdeck.unflatten.trace.state import ProgramState, StateEntry, StateKind

_LIFTED = re.compile(r"(.+\.)?lifted_tensor_\d+")
_COPIES = {torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.clone.default}


def share_lifted_constants(program: ExportedProgram, state: ProgramState) -> None:
    """Let each module have one constant for all equal ones that it only copies; change ``state``.

    Args:
        program: The program.
        state: Its state.
    """
    if not program.constants:
        return
    first: dict[object, str] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        entry = state.entries.get(state.targets.get(node.name, ""))
        if entry is None or not _is_lifted(entry):
            continue
        if all(user.target in _COPIES for user in _users(node, program.graph_module)):
            name = first.setdefault(_content(entry), entry.name)
            if name != entry.name:
                state.rename(node.name, name)


def _is_lifted(entry: StateEntry) -> bool:
    is_constant = entry.kind is StateKind.CONSTANT and type(entry.value) is torch.Tensor
    return is_constant and _LIFTED.fullmatch(entry.name) is not None


def _content(entry: StateEntry) -> object:
    value: torch.Tensor = entry.value
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
        return entry.name
    owner = entry.name.rpartition(".")[0]
    what = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
    return (owner, *what, value.requires_grad, sha256(bytes_of(value)).digest())


def _users(node: Node, module: GraphModule) -> Iterator[Node]:
    """Yield what reads a node, in pieces that run in another mode too."""
    for user in node.users:
        number = MODE_REGIONS.get(user.target)
        if number is None:
            yield user
            continue
        held, *taken = user.args[number:]
        inner = getattr(module, str(held.target)) if isinstance(held, Node) else None
        if not isinstance(inner, GraphModule):
            yield user
            continue
        for value, placeholder in zip(
            taken, inner.graph.find_nodes(op="placeholder"), strict=True
        ):
            if value is node:
                yield from _users(placeholder, inner)
