"""Values that depend on constants alone: masks, positions, tables of sines."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lowerdeck.torch_base import (
    Behaviours,
    Effect,
    OpOverload,
    returns_alias,
    returns_view,
    schema_of,
)

_MOST_BYTES = 4 << 20
"""How large a result may be that takes more bytes than what it is computed of."""
_ALL_BYTES = 8 * _MOST_BYTES
"""How large results may be together that are held in memory."""
_aten = torch.ops.aten
_MODES = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Calls of a graph under a mode of torch, which changes nothing that is computed ahead of time."""
ASSERTION = _aten._assert_tensor_metadata.default
"""What the export saw of a tensor's dtype and device."""
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_MAY_COPY = frozenset({_aten.reshape.default, _aten.flatten.using_ints, _aten.contiguous.default})
"""What returns a view where it can, and else a copy."""
_INNER_TENSOR = "export.access_subclass_inner_tensor.default"
"""What reads a tensor of those that a subclass of tensors, torchao's for one, is made of."""
_SIZES_ONLY = frozenset(
    {
        *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default),
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    }
)
"""Operators that read no element of their first argument."""


def known_nodes(
    nodes: Iterable[Node], constants: Collection[str], *, in_memory: bool = False
) -> list[Node]:
    """Return the calls whose results no input of the program changes.

    A backend may compute them ahead of time. Constants of a program are those that no run
    changes, so neither do these; what draws random numbers or writes in place is none of them,
    nor what would make the file much larger.

    Args:
        nodes: Nodes of a graph, each after those that it reads.
        constants: Names of the placeholders that no run changes.
        in_memory: Whether all results are to be held in memory: then none may be large for being
            computed of something large, such as weights, nor may all of them together.

    Returns:
        The nodes, in order.
    """
    computable: dict[Node, None] = {}
    left = _ALL_BYTES
    for node in nodes:
        if node.op != "call_function":
            continue
        skipped = node.args[0] if node.target in _SIZES_ONLY else None
        # Asked first: nearly every call reads what an input changes.
        if (
            all(
                source is skipped
                or source in computable
                or source.op == "get_attr"
                or (source.op == "placeholder" and source.name in constants)
                for source in node.all_input_nodes
            )
            and _is_computable(node)
            and _is_small(node, in_memory=in_memory)
        ):
            size = _bytes_made(node) if in_memory else 0
            if size <= left:
                left -= size
                computable[node] = None
    return list(computable)


def mode_stretches(nodes: Iterable[Node], behaviours: Behaviours) -> dict[Node, int]:
    """Return for each node how many changes of a mode stand before it.

    No partition holds nodes of two stretches: what is called once is called in one mode.

    Args:
        nodes: The nodes of a graph, in order.
    """
    changes, stretches = 0, {}
    for node in nodes:
        stretches[node] = changes
        if behaviours.effect(node) & Effect.MODE:
            changes += 1
    return stretches


def read_by_one(
    computable: Sequence[Node],
    partitions: Sequence[Sequence[Node]],
    stretches: Mapping[Node, int] = MappingProxyType({}),
) -> list[Node]:
    """Return what is known and read by one partition alone, nor by anybody else.

    What asserts of a tensor what was seen when the program was exported does not count.

    Args:
        known: Calls whose results no input changes, in order.
        partitions: The nodes of each partition, ``known`` or not.
        stretches: As :func:`mode_stretches` tells; what is read in another one than its own is
            none of them.
    """
    part_of = {node: number for number, part in enumerate(partitions) for node in part}
    ahead = set(computable)
    readers: dict[Node, int] = {}
    kept = []
    for node in reversed(computable):
        where = stretches.get(node)
        single = {
            -1
            if stretches.get(user) != where
            else readers.get(user, -1)
            if user in ahead
            else part_of.get(user, -1)
            for user in node.users
            if user.target is not ASSERTION
        }
        readers[node] = single.pop() if len(single) == 1 else -1
        if readers[node] != -1:
            kept.append(node)
    return kept[::-1]


def compute_known(node: Node, read: Callable[[Node], Any]) -> Any:
    """Return what a call of ``known_nodes`` computes.

    Args:
        read: Returns the value of a constant, or of a call that was computed before.
    """

    def value(source: Node) -> Any:
        if source.op == "get_attr":
            return getattr(node.graph.owning_module, str(source.target))
        if node.target in _SIZES_ONLY:
            seen = source.meta["val"]
            # Only `new_zeros` and the like are computed of symbolic sizes, which they do not read.
            sizes = seen.shape if all(isinstance(size, int) for size in seen.shape) else ()
            return torch.zeros((), dtype=seen.dtype).expand(sizes)
        return read(source)

    args: Any
    args, kwargs = map_arg((node.args, node.kwargs), value)
    # Computed values may have another layout than in the program, where a view fits.
    target: Any = _aten.reshape.default if node.target in _VIEWS else node.target
    if isinstance(target, OpOverload) and schema_of(target).is_mutable:
        # What is written may be a view of a weight here.
        args = (args[0].clone(), *args[1:])
    with torch.no_grad():
        return target(*args, **kwargs)


def _is_computable(node: Node) -> bool:
    target = node.target
    if target is operator.getitem or str(target) == _INNER_TENSOR:
        return True
    if getattr(target, "__name__", "") in _MODES:
        (name,) = (
            str(source.target) for source in node.all_input_nodes if source.op == "get_attr"
        )
        inner = getattr(node.graph.owning_module, name).graph.nodes
        calls = [source for source in inner if source.op == "call_function"]
        return all(source.target is ASSERTION or _is_computable(source) for source in calls)
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not _tensors(node):
        return False
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return not drawn and not _writes_into_others(node, target)


def _tensors(node: Node) -> Sequence[torch.Tensor]:
    """Return the example results of a node; none if one is not a tensor, or of symbolic sizes."""
    value = node.meta.get("val")
    results = value if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(tensor, torch.Tensor) for tensor in results):
        return []
    return [tensor for tensor in results if all(isinstance(size, int) for size in tensor.shape)]


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


def _is_small(node: Node, *, in_memory: bool) -> bool:
    if in_memory:
        return _bytes_made(node) <= _MOST_BYTES
    bytes_read = sum(_bytes(source) for source in node.all_input_nodes)
    return _bytes(node) <= max(_MOST_BYTES, bytes_read)


def _bytes_made(node: Node) -> int:
    """Return how much memory a call takes: none where it gives a view of something."""
    target = node.target
    if target is operator.getitem or str(target) == _INNER_TENSOR:
        return 0
    dtypes = {
        tensor.dtype for source in (node, *node.all_input_nodes) for tensor in _tensors(source)
    }
    is_view = returns_view(target) and target not in _MAY_COPY and len(dtypes) == 1
    return 0 if is_view else _bytes(node)


def _bytes(node: Node) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in _tensors(node))
