"""Common subexpression elimination for programs with dynamic sizes.

transformers computes positions, masks and biases in each layer. With static sizes they are
constants; with dynamic sizes each layer would compute them at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.torch_base import OpOverload, schema_of, writes_in_place


def with_merged_calls(program: ExportedProgram) -> ExportedProgram:
    """Return a program with equal calls merged.

    Args:
        program: A functional program; not changed, and returned itself if no calls are equal.
    """
    # A custom operator may write between two equal reads.
    return program if writes_in_place(program.graph_module) else rewritten(program, _merge)


def _merge(graph: Graph) -> bool:
    earlier: dict[Any, Node] = {}
    changed = False
    for node in graph.nodes:
        if _is_mergeable(node):
            same = earlier.setdefault(_key(node), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
                changed = True
    return changed


def _is_mergeable(node: Node) -> bool:
    value, target = node.meta.get("val"), node.target
    if isinstance(value, torch.Tensor):
        return (
            isinstance(target, OpOverload)
            and target.namespace == "aten"
            and torch.Tag.nondeterministic_seeded not in target.tags
            and not schema_of(target).is_mutable
            and "empty" not in str(target)
        )
    is_size = isinstance(value, torch.SymInt) and "unbacked_bindings" not in node.meta
    return is_size and node.op == "call_function"


def _key(node: Node) -> Any:
    """Return a key that is equal for calls that compute the same."""
    value = node.meta["val"]
    options = {name: value for name, value in node.kwargs.items() if name not in _OPTIONS}
    dtype = value.dtype if isinstance(value, torch.Tensor) else None
    return node.target, dtype, _frozen(node.args), _frozen(options)


_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Ignored arguments: the result's dtype is compared, the others are equal in a program."""


def _frozen(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(argument[name])) for name in sorted(argument))
    # 1 == True == 1.0, but they are different arguments; NaN differs from itself.
    return argument if isinstance(argument, Node) else (type(argument), repr(argument))
