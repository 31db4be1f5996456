"""Merge equal calls, and remove permutations that cancel out, in programs with dynamic sizes.

Some models of transformers compute positions, masks and biases in each layer. With static sizes
they are constants; with dynamic sizes each layer would compute them at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from lowerdeck.lowered_module.program.view_factors import merged_dims, shape_of
from lowerdeck.lowered_module.program.view_rules import MOVES, order_of
from lowerdeck.torch_base import OpOverload, new_fake, schema_of, writes_in_place

_aten = torch.ops.aten


def merge_calls(graph: Graph) -> bool:
    """Merge equal calls of a graph in place; return whether anything changed."""
    # A custom operator may write between two equal reads.
    if graph.owning_module is None or writes_in_place(graph.owning_module):
        return False
    earlier: dict[Any, Node] = {}
    changed = False
    skipped: dict[Node, None] = {}
    for node in graph.nodes:
        if _is_mergeable(node):
            chain = _chain_to_permutation(node)
            original = _undo_permutations(node, chain) if chain else None
            if original is not None:
                skipped.update(dict.fromkeys(chain))
            same = original or earlier.setdefault(_key(node), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
                changed = True
    # Later calls may be equal to these, so they are erased last, if nothing reads them.
    for node in sorted(skipped, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return changed


def _chain_to_permutation(node: Node) -> list[Any]:
    """Return the calls before a permutation, the last first, up to another permutation.

    There may be a view, or a copy and a view, between both permutations. For other nodes the list
    is empty.
    """
    if node.target not in MOVES:
        return []
    chain: list[Any] = [node.args[0]]
    for target in (_aten.view.default, _aten.clone.default):
        if chain[-1].target is not target:
            break
        chain.append(chain[-1].args[0])
    return chain if chain[-1].target in MOVES else []


def _undo_permutations(node: Node, chain: list[Any]) -> Node | None:
    """Return the tensor before two permutations that cancel out, in the shape of their result.

    The result is None if they do not cancel out. If a view between both merges dimensions, as in
    video models that flatten patches, each merged group counts as one dimension.

    Args:
        chain: From ``_chain_to_permutation``.
    """
    *between, first = chain
    groups = merged_dims(shape_of(first), shape_of(chain[0]))
    if groups is None:
        return None
    order, first_order = order_of(node), order_of(first)
    if [first_order[dim] for axis in order for dim in groups[axis]] != sorted(first_order):
        return None
    original: Node = first.args[0]
    if not between:
        return original
    view, *copies = between
    value = node.meta["val"]
    with node.graph.inserting_before(node):
        for copy in copies:
            fake = original.meta["val"]
            original = node.graph.call_function(copy.target, (original,), copy.kwargs)
            original.meta = {**copy.meta, "val": new_fake(fake, fake.shape)}
            value = new_fake(fake, shape_of(node))
        sizes = view.args[1]
        reshaped = (original, [sizes[axis] for axis in order])
        original = node.graph.call_function(view.target, reshaped)
    original.meta = {**node.meta, "val": value}
    return original


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
    """Return a hashable key; calls with equal keys compute equal values."""
    value = node.meta["val"]
    options = {name: value for name, value in node.kwargs.items() if name not in _OPTIONS}
    dtype = value.dtype if isinstance(value, torch.Tensor) else None
    return node.target, dtype, _frozen(node.args), _frozen(options)


_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Ignored arguments: the result's dtype is compared; the others are equal in one program."""


def _frozen(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(argument[name])) for name in sorted(argument))
    # 1 == True == 1.0, but they are different arguments; NaN differs from itself.
    return argument if isinstance(argument, Node) else (type(argument), repr(argument))
