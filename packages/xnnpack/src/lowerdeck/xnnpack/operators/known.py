"""What a program computes of its constants alone: masks, positions, tables of sines."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.fx import Node

from lowerdeck.torch_base import OpOverload, returns_alias, schema_of

_MOST_BYTES = 4 << 20
"""How large a result may be that takes more bytes than what it is computed of."""
_aten = torch.ops.aten
_MODES = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Calls of a graph under a mode of torch, which changes nothing that is computed ahead of time."""
ASSERTION = _aten._assert_tensor_metadata.default
"""What the export saw of a tensor's dtype and device."""
INNER_TENSOR = "export.access_subclass_inner_tensor.default"
"""What reads a tensor of those that a subclass of tensors, torchao's for one, is made of."""
SIZES_ONLY = frozenset(
    {
        *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    }
)
"""Operators that read no element of their first argument."""


def known_nodes(nodes: Iterable[Node], constants: Collection[str]) -> list[Node]:
    """Return the calls whose results no input of the program changes.

    The backend computes them ahead of time. Constants of a program are those that no run changes,
    so neither do these; what draws random numbers or writes in place is none of them, nor what
    would make the file much larger.

    Args:
        nodes: Nodes of a graph, each after those that it reads.
        constants: Names of the placeholders that no run changes.

    Returns:
        The nodes, in order.
    """
    found: dict[Node, None] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        skipped = node.args[0] if node.target in SIZES_ONLY else None
        # Asked first: nearly every call reads what an input changes.
        if (
            all(
                one is skipped
                or one in found
                or one.op == "get_attr"
                or (one.op == "placeholder" and one.name in constants)
                for one in node.all_input_nodes
            )
            and _is_computable(node)
            and _is_small(node)
        ):
            found[node] = None
    return list(found)


def _is_computable(node: Node) -> bool:
    target = node.target
    if target is operator.getitem or str(target) == INNER_TENSOR:
        return True
    if getattr(target, "__name__", "") in _MODES:
        inner = _inner_calls(node)
        return all(one.target is ASSERTION or _is_computable(one) for one in inner)
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not _tensors(node):
        return False
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return not drawn and not _writes_into_others(node, target)


def _inner_calls(node: Node) -> list[Node]:
    """Return the calls of the graph that a node calls."""
    (name,) = (str(one.target) for one in node.all_input_nodes if one.op == "get_attr")
    inner = getattr(node.graph.owning_module, name)
    return [one for one in inner.graph.nodes if one.op == "call_function"]


def _tensors(node: Node) -> Sequence[torch.Tensor]:
    """Return the example results of a node; none if one is no tensor, or of symbolic sizes."""
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    return (
        [
            one
            for one in results
            if isinstance(one, torch.Tensor) and all(isinstance(size, int) for size in one.shape)
        ]
        if all(isinstance(one, torch.Tensor) for one in results)
        else []
    )


def _writes_into_others(node: Node, target: OpOverload) -> bool:
    """Return whether a node overwrites what more than itself can see."""
    if not schema_of(target).is_mutable:
        return False
    source = node.args[0] if node.args else None
    return (
        not isinstance(source, Node)
        or not isinstance(source.target, OpOverload)
        or len(source.users) > 1
        or returns_alias(source.target)
    )


def _is_small(node: Node) -> bool:
    bytes_read = sum(_bytes(one) for one in node.all_input_nodes)
    return _bytes(node) <= max(_MOST_BYTES, bytes_read)


def _bytes(node: Node) -> int:
    return sum(math.prod(one.shape) * one.element_size() for one in _tensors(node))
