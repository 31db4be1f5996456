"""Common subexpressions and permutations that cancel out in programs with dynamic sizes.

transformers computes positions, masks and biases in each layer. With static sizes they are
constants; with dynamic sizes each layer would compute them at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.copies import rewritten
from lowerdeck.lowered_module.program.merged_sizes import dims_merged, shape_of
from lowerdeck.lowered_module.program.view_rules import MOVES, order_of
from lowerdeck.torch_base import OpOverload, new_fake, schema_of, writes_in_place

_aten = torch.ops.aten


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
    crossed: dict[Node, None] = {}
    for node in graph.nodes:
        if _is_mergeable(node):
            restored = _restored(node)
            if restored is not None:
                crossed.update(dict.fromkeys(_between(node)))
            same = restored or earlier.setdefault(_key(node), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
                changed = True
    # Later calls may be equal to these, so they are erased last, if nothing reads them.
    for node in sorted(crossed, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return changed


def _between(node: Node) -> Iterator[Node]:
    """Yield the first of two permutations that cancel out, and a copy and a view after it."""
    source: Any = node.args[0]
    while source.target not in MOVES:
        yield source
        source = source.args[0]
    yield source


def _restored(node: Node) -> Node | None:
    """Return the tensor that two permutations restore, or a view of it if there is one between.

    Tokens of a video are its flattened patches, of which the channels come first, then last.
    """
    if node.target not in MOVES:
        return None
    view: Any = node.args[0]
    before = view.args[0] if view.target is _aten.view.default else view
    copy = before if before is not view and before.target is _aten.clone.default else None
    before = before if copy is None else copy.args[0]
    dims = dims_merged(shape_of(before), shape_of(view)) if before.target in MOVES else None
    if dims is None:
        return None
    order, order_before = order_of(node), order_of(before)
    if [order_before[dim] for axis in order for dim in dims[axis]] != sorted(order_before):
        return None
    restored: Node = before.args[0]
    if before is view:
        return restored
    meta = node.meta
    with node.graph.inserting_before(node):
        if copy is not None:
            value = restored.meta["val"]
            restored = node.graph.call_function(copy.target, (restored,), copy.kwargs)
            restored.meta = {**copy.meta, "val": new_fake(value, value.shape)}
            meta = {**meta, "val": new_fake(value, shape_of(node))}
        sizes = [view.args[1][axis] for axis in order]
        result = node.graph.call_function(view.target, (restored, sizes))
    result.meta = {**meta}
    return result


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
